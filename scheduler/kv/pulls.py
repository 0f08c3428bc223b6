"""Pulls: blocks that the ranks read from another replica for a sequence that came from there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ...proto.block_tables import IntArray
from ...proto.codec import NO_INTS
from ...proto.kv_transfer import KvOffer, KvPull
from ..sequences.sequence import Sequence
from .block_pool import BlockPool
from .state_slots import StateSlots


@dataclass(frozen=True, slots=True)
class PulledBlock:
    """A block that is to get the content of another replica's.

    Attributes:
        index: of the sequence's blocks.
    """

    group: int
    index: int
    source: int
    target: int


@dataclass(slots=True)
class Pull:
    """Blocks on their way.

    Attributes:
        sequence: waits for them; None once it does not any more.
        targets: blocks that are filled, each with a reference of the pull.
        state: slot that is filled, with a reference too, and the digest of the blocks before it; None for none. Its
            place is behind those of all targets.
        shared: cached blocks of the same beginning, each with a reference too: without them the others are of no use.
        reading: ranks that may still write to the targets.
        failed: places in `targets` of the blocks that a rank did not get.
        num_bytes, seconds: read by the rank that read most.
        has_ended: the ranks are told that nobody waits for it any more.
    """

    pull_id: int
    sequence: Sequence | None
    targets: list[PulledBlock]
    state: tuple[int, bytes] | None
    shared: list[int]
    deadline: float
    reading: set[int]
    failed: set[int] = field(default_factory=set)
    problem: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    has_ended: bool = False

    @property
    def complete(self) -> list[PulledBlock]:
        """The blocks that all ranks have."""
        return [block for place, block in enumerate(self.targets) if place not in self.failed]

    @property
    def complete_state(self) -> tuple[int, bytes] | None:
        """The state, if all ranks have it."""
        return None if len(self.targets) in self.failed else self.state


class Pulls:
    """The pulls of one replica. A target is held until no rank can write to it any more, whoever waits for it."""

    def __init__(self, pool: BlockPool, state_slots: StateSlots, num_groups: int, num_ranks: int) -> None:
        self._pool, self._state_slots = pool, state_slots
        self._num_groups, self._num_ranks = num_groups, num_ranks
        self._pulls: dict[int, Pull] = {}
        self._orders: list[KvPull] = []
        self._ended: list[int] = []
        self._num_begun = 0

    def __len__(self) -> int:
        return len(self._pulls)

    def __iter__(self) -> Iterator[Pull]:
        return iter(list(self._pulls.values()))

    @property
    def held(self) -> list[int]:
        """Return the blocks that are held, as often as they are."""
        return [
            block_id
            for pull in self._pulls.values()
            for block_id in (*pull.shared, *(block.target for block in pull.targets))
        ]

    @property
    def held_states(self) -> list[int]:
        return [pull.state[0] for pull in self._pulls.values() if pull.state is not None]

    @property
    def are_read(self) -> bool:
        """Return whether reports of the ranks are due."""
        return any(pull.reading for pull in self._pulls.values())

    @property
    def has_orders(self) -> bool:
        return bool(self._orders or self._ended)

    def get(self, pull_id: int) -> Pull | None:
        return self._pulls.get(pull_id)

    def begin(
        self, sequence: Sequence, offer: KvOffer, wanted: list[tuple[int, int, int]], shared: list[int],
        deadline: float, timeout_s: float, state_slot: int = 0,
    ) -> Pull:  # fmt: skip
        """Allocate blocks, of which the pool has enough, and order the ranks to fill them.

        Args:
            wanted: (group, index, block of the other replica), by group.
            shared: cached blocks to hold meanwhile.
            deadline: when the sequence goes on without the blocks.
            timeout_s: when the ranks give up.
            state_slot: of `StateSlots.take_slot`, for the offer's state; 0 to read none.
        """
        self._pool.share(shared)
        targets = [
            PulledBlock(*block, target)
            for block, target in zip(wanted, self._pool.allocate(len(wanted)), strict=True)
        ]
        self._num_begun += 1
        state = (state_slot, offer.digest) if state_slot else None
        pull = Pull(self._num_begun, sequence, targets, state, shared, deadline, set(range(self._num_ranks)))
        self._pulls[pull.pull_id] = pull
        counts = [sum(block.group == group for block in targets) for group in range(self._num_groups)]
        sources, own = [block.source for block in targets], [block.target for block in targets]
        self._orders.append(
            KvPull(
                pull.pull_id,
                offer.generation,
                offer.endpoints,
                np.array([*counts, 1] if state_slot else counts, np.int32),
                np.array([*sources, -offer.state_slot] if state_slot else sources, np.int32),
                np.array([*own, -state_slot] if state_slot else own, np.int32),
                timeout_s,
            )
        )
        return pull

    def cancel(self, pull: Pull) -> None:
        """Wait for a pull no more; its blocks stay held while ranks may write to them."""
        pull.sequence = None
        if pull.reading:
            self._end(pull)
        else:
            self.release(pull)

    def note_read(self, pull: Pull, rank: int) -> bool:
        """Note that a rank writes to the targets no more; return whether that holds for all ranks now."""
        pull.reading.discard(rank)
        if pull.reading:
            return False
        self._end(pull)
        return True

    def release(self, pull: Pull) -> None:
        """Release the blocks of a pull, to which no rank writes any more."""
        assert not pull.reading, f"ranks {pull.reading} may write to the blocks of pull {pull.pull_id}"
        del self._pulls[pull.pull_id]
        self._pool.release(
            [*(block.target for block in reversed(pull.targets)), *reversed(pull.shared)], None
        )
        if pull.state is not None:
            self._state_slots.end_pull(pull.state[0])

    def forget(self) -> list[Sequence]:
        """End all pulls: no rank reads any more. Returns the sequences that wait."""
        waiting = [pull.sequence for pull in self._pulls.values() if pull.sequence is not None]
        for pull in list(self._pulls.values()):
            pull.reading.clear()
            self.release(pull)
        self._orders, self._ended = [], []
        return waiting

    def take(self) -> tuple[tuple[KvPull, ...], IntArray]:
        """Return what the ranks do not know yet: new pulls, and those that are not waited for any more."""
        orders, ended = tuple(self._orders), self._ended
        self._orders, self._ended = [], []
        return orders, np.array(ended, np.int32) if ended else NO_INTS

    def _end(self, pull: Pull) -> None:
        if not pull.has_ended:
            pull.has_ended = True
            self._ended.append(pull.pull_id)
