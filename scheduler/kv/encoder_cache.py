"""EncoderCache: the encoder outputs that the ranks hold, of bounded memory. All ranks hold the same ones.

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


class EncoderCache:
    """media_id |-> bytes of its encoder output on each rank, the least recently used first.

    Args:
        capacity: bytes of all outputs. One that is larger is held alone, as long as successive plans read it.
        row_bytes: of an output's row.
        max_rows: rows that a step may compute. An image with more of them is the only one of its step.

    Attributes:
        digest: of the outputs that the ranks hold after the plans so far.
        num_bytes: of the outputs, with those that the next plan computes.
        num_encoded: images encoded so far.
    """

    def __init__(self, capacity: int, row_bytes: int, max_rows: int) -> None:
        self.capacity = capacity
        self._row_bytes, self._max_rows = row_bytes, max_rows
        self._outputs: OrderedDict[int, int] = OrderedDict()
        self._pinned: set[int] = set()
        self._pinned_bytes = 0
        self._rows_left = max_rows
        self._encodes: list[int] = []
        self._drops: list[int] = []
        self.digest = self.num_bytes = self.num_encoded = 0

    def __len__(self) -> int:
        return len(self._outputs)

    def __contains__(self, media_id: int) -> bool:
        return media_id in self._outputs

    def begin_plan(self) -> None:
        """Unpin all outputs, and begin with the whole budget of a step."""
        self._pinned.clear()
        self._pinned_bytes, self._rows_left = 0, self._max_rows

    def pin(self, media_id: int) -> None:
        """Keep an output, which the next plan reads."""
        self._outputs.move_to_end(media_id)
        if media_id not in self._pinned:
            self._pinned.add(media_id)
            self._pinned_bytes += self._outputs[media_id]

    def encode(self, media_id: int, num_rows: int) -> bool:
        """Have the next plan compute and read an output that is not there; return False if it may not.

        It may not if the step's budget is spent, or the outputs that the plan reads already leave no room.
        """
        num_bytes = num_rows * self._row_bytes
        if num_rows > self._rows_left < self._max_rows:
            return False
        if self._pinned and self._pinned_bytes + num_bytes > self.capacity:
            return False
        self._evict_down_to(self.capacity - num_bytes)
        self._outputs[media_id] = num_bytes
        self.num_bytes += num_bytes
        self._rows_left -= num_rows
        self._encodes.append(media_id)
        self.pin(media_id)
        return True

    def cancel(self, media_id: int) -> None:
        """Do not compute an output after all, if it is still to be computed."""
        if media_id in self._encodes:
            self._encodes.remove(media_id)
            num_bytes = self._outputs.pop(media_id)
            self.num_bytes -= num_bytes
            if media_id in self._pinned:
                self._pinned.remove(media_id)
                self._pinned_bytes -= num_bytes

    def take_orders(self) -> tuple[IntArray, IntArray]:
        """Return the outputs that the ranks drop and compute in the plan that is made now."""
        if self.num_bytes > self.capacity:
            self._evict_down_to(self.capacity)
        if not (self._encodes or self._drops):  # as in most plans
            return NO_INTS, NO_INTS
        drops, encodes = self._drops, self._encodes
        self._drops, self._encodes = [], []
        self.num_encoded += len(encodes)
        self.digest = outputs_digest(self._outputs)
        return np.array(drops, np.int32), np.array(encodes, np.int32)

    def reset(self) -> None:
        """Forget all outputs: the ranks have none."""
        self.begin_plan()
        self._outputs.clear()
        self._encodes, self._drops = [], []
        self.digest = self.num_bytes = 0

    def check_integrity(self) -> None:
        """Raise AssertionError if the counts disagree with the outputs, or the memory is exceeded."""
        assert self.num_bytes == sum(self._outputs.values()), (
            "bytes of encoder outputs are lost or counted twice"
        )
        held = {*self._outputs}.difference(self._encodes)
        assert self.digest == outputs_digest(held | {*self._drops}), "the digest is of other encoder outputs"
        assert not held & {*self._drops}, "an encoder output is held and dropped"
        is_within = self.num_bytes <= self.capacity or len(self._outputs) == 1
        assert is_within, f"encoder outputs have {self.num_bytes} bytes, at most {self.capacity} are allowed"

    def _evict_down_to(self, num_bytes: int) -> None:
        """Evict outputs that are not pinned until the others have at most so many bytes, if possible."""
        for media_id in [each for each in self._outputs if each not in self._pinned]:
            if self.num_bytes <= max(0, num_bytes):
                return
            self.num_bytes -= self._outputs.pop(media_id)
            if media_id in self._encodes:  # of a try that ended without a plan
                self._encodes.remove(media_id)
            else:
                self._drops.append(media_id)
