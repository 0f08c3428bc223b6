"""EncoderCache: the encoder outputs that the ranks hold, of bounded memory. All ranks hold the same ones.

A large image is encoded in several steps, so that it delays other sequences no more than a chunk of text does: each
plan says which share of its work is done after the step. Until then the ranks keep what they have, in the room of the
output. It goes on in plans with a chunk that waits for it, and may be evicted between them like an output.

An output is *pinned* by the plan in which a chunk reads it; any other may be evicted, the least recently used first.
A sequence within an image may lose the image's output to one of higher precedence, and has it computed again. So no
sequence holds outputs while it waits for blocks or rows, and none can wait for another in a circle.

Plans are executed in order, so an output that a plan drops may still be read by the plans before it: no fence is
needed.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from ...proto.block_tables import IntArray, outputs_digest
from ...proto.codec import NO_INTS
from ...proto.step import WHOLE_IMAGE


class EncoderCache:
    """media_id |-> bytes of its encoder output on each rank, the least recently used first.

    Args:
        capacity: bytes of all outputs. One that is larger is held alone, as long as successive plans read it.
        row_bytes: of an output's row.
        max_work: of a step, in multiplications.

    Attributes:
        digest: of the outputs that the ranks hold after the plans so far, also those in part.
        num_bytes: of the outputs, with those that the next plan computes.
        num_encoded: images encoded so far.
    """

    def __init__(self, capacity: int, row_bytes: int, max_work: int) -> None:
        self.capacity = capacity
        self._row_bytes, self._max_work = row_bytes, max_work
        self._outputs: OrderedDict[int, int] = OrderedDict()
        self._in_part: dict[int, tuple[int, int]] = {}  # media_id |-> the work that is done, and all of it
        self._on_ranks: set[int] = set()  # the outputs after the plans so far, also those in part
        self._pinned: set[int] = set()
        self._pinned_bytes = 0
        self._work_left = max_work
        self._encodes: list[int] = []
        self._drops: list[int] = []
        self.digest = self.num_bytes = self.num_encoded = 0

    def __len__(self) -> int:
        return len(self._outputs)

    def __contains__(self, media_id: int) -> bool:
        """Return whether chunks of the next plan may read an output."""
        return media_id in self._outputs and media_id not in self._in_part

    def has_begun(self, media_id: int) -> bool:
        """Return whether an output is computed in part, by the plans so far and the next one."""
        return media_id in self._in_part

    @property
    def is_encoding(self) -> bool:
        """Return whether the next plan computes outputs."""
        return bool(self._encodes)

    def begin_plan(self) -> None:
        """Unpin all outputs, and begin with the whole budget of a step."""
        self._pinned.clear()
        self._pinned_bytes, self._work_left = 0, self._max_work

    def pin(self, media_id: int) -> None:
        """Keep an output, which the next plan reads."""
        self._outputs.move_to_end(media_id)
        if media_id not in self._pinned:
            self._pinned.add(media_id)
            self._pinned_bytes += self._outputs[media_id]

    def encode(self, media_id: int, num_rows: int, work: int) -> bool:
        """Have the next plan compute an output that is not there, or a part of it; return whether it is whole then.

        Nothing is computed if the step's budget is spent, or the outputs that the plan reads already leave no room.
        """
        if self._work_left <= 0 or media_id in self._encodes:
            return False
        num_bytes = num_rows * self._row_bytes
        if media_id not in self._outputs:
            if self._pinned and self._pinned_bytes + num_bytes > self.capacity:
                return False
            self._evict_down_to(self.capacity - num_bytes)
            self._outputs[media_id] = num_bytes
            self.num_bytes += num_bytes
        done, _ = self._in_part.pop(media_id, (0, work))
        spent = min(work - done, self._work_left)
        self._work_left -= spent
        if done + spent < work:
            self._in_part[media_id] = done + spent, work
        self._encodes.append(media_id)
        self.pin(media_id)
        return media_id not in self._in_part

    def cancel(self, media_id: int) -> None:
        """Do not compute an output after all, unless all of it was computed by the plans so far."""
        if media_id not in self._in_part and media_id not in self._encodes:
            return
        if media_id in self._pinned:
            self._pinned.remove(media_id)
            self._pinned_bytes -= self._outputs[media_id]
        self._remove(media_id)

    def take_orders(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return the outputs that the ranks drop and compute in the plan that is made now, see StepPlan.

        Returns:
            StepPlan.media_drops, encodes and encode_shares.
        """
        if self.num_bytes > self.capacity:
            self._evict_down_to(self.capacity)
        if not (self._encodes or self._drops):  # as in most plans
            return NO_INTS, NO_INTS, NO_INTS
        drops, encodes = self._drops, self._encodes
        self._drops, self._encodes = [], []
        self.num_encoded += sum(media_id not in self._in_part for media_id in encodes)
        self._on_ranks = {*self._outputs}
        self.digest = outputs_digest(self._outputs)
        parts = (self._in_part.get(media_id, (1, 1)) for media_id in encodes)
        shares = [WHOLE_IMAGE * done // work for done, work in parts]
        return np.array(drops, np.int32), np.array(encodes, np.int32), np.array(shares, np.int32)

    def reset(self) -> None:
        """Forget all outputs: the ranks have none."""
        self.begin_plan()
        self._outputs.clear()
        self._in_part.clear()
        self._on_ranks.clear()
        self._encodes, self._drops = [], []
        self.digest = self.num_bytes = 0

    def check_integrity(self) -> None:
        """Raise AssertionError if the counts disagree with the outputs, or the memory is exceeded."""
        assert self.num_bytes == sum(self._outputs.values()), (
            "bytes of encoder outputs are lost or counted twice"
        )
        assert not self._encodes, "an image is to be encoded, and no plan has been made"
        assert self.digest == outputs_digest(self._on_ranks), "the digest is of other encoder outputs"
        held = {*self._outputs}
        assert not held & {*self._drops}, "an encoder output is held and dropped"
        assert self._on_ranks == held | {*self._drops}, "the ranks hold other encoder outputs"
        assert self._in_part.keys() <= held, "an image that is not held is encoded in part"
        is_within = self.num_bytes <= self.capacity or len(self._outputs) == 1
        assert is_within, f"encoder outputs have {self.num_bytes} bytes, at most {self.capacity} are allowed"

    def _evict_down_to(self, num_bytes: int) -> None:
        """Evict outputs that are not pinned until the others have at most so many bytes, if possible."""
        for media_id in [each for each in self._outputs if each not in self._pinned]:
            if self.num_bytes <= max(0, num_bytes):
                return
            self._remove(media_id)

    def _remove(self, media_id: int) -> None:
        self.num_bytes -= self._outputs.pop(media_id)
        self._in_part.pop(media_id, None)
        if media_id in self._encodes:
            self._encodes.remove(media_id)
        if media_id in self._on_ranks:
            self._drops.append(media_id)
