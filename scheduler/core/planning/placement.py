"""Placement: chooses the partitions of the KV pool in which waiting sequences start, for one step."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from ...kv.block_manager import BlockManager
from ...kv.prefix_lookup import Prefix
from ...sequences.sequence import Sequence

# While sequences run in a partition, admission leaves this share of it to their growth: an admission that forces a
# preemption a few steps later costs a prefill.
WATERMARK = 0.01
# Most sequences passed in one step. Only sequences with host blocks can be more than there are partitions.
MAX_PASSED = 16


@dataclass(frozen=True, slots=True)
class Place:
    """A partition for a waiting sequence.

    Attributes:
        prefix: the sequence's cached prefix there, which names the partition.
        num_needed: blocks that must be free for the sequence to start, among them the share for growth.
        num_free, num_unheld: blocks that are free now, and also once the steps in flight are done.
        is_full: the running sequences lack blocks, so no sequence starts or takes blocks there in this step.
        has_slot, will_have_slot: a state slot is free now, and once the steps in flight are done.
        block_size: tokens per block.
    """

    prefix: Prefix
    num_needed: int
    num_free: int
    num_unheld: int
    is_full: bool
    has_slot: bool
    will_have_slot: bool
    block_size: int

    @property
    def partition(self) -> int:
        return self.prefix.partition

    @property
    def num_cached_tokens(self) -> int:
        return self.prefix.num_tokens(self.block_size)

    @property
    def has_room(self) -> bool:
        return not self.is_full and self.has_slot and self.num_needed <= self.num_free

    @property
    def will_have_room(self) -> bool:
        """Return whether there is room once the steps in flight are done."""
        return not self.is_full and self.will_have_slot and self.num_needed <= self.num_unheld


class Placement:
    """Partitions in which waiting sequences may start in one step.

    A sequence that fits nowhere is passed: later ones may start before it, but not in the partition that is kept for
    it. It gets the blocks that this partition frees, as the first of the queue does in a pool of one partition.

    Args:
        full_partitions: partitions whose running sequences lack blocks.

    Attributes:
        passed: seq_ids of passed sequences.
    """

    def __init__(self, blocks: BlockManager, full_partitions: Set[int]) -> None:
        self._blocks, self._full = blocks, full_partitions
        self._kept: set[int] = set()
        self.passed: set[int] = set()

    @property
    def is_open(self) -> bool:
        """Return whether sequences may start in some partition."""
        return len(self._full | self._kept) < self._blocks.num_partitions and len(self.passed) < MAX_PASSED

    def places_for(self, sequence: Sequence) -> list[Place]:
        """Return the partitions that a sequence may start in or wait for, the best first.

        If several have room, or none has, a cached prefix counts as much as a difference of as many free blocks:
        a prompt that many requests share does not bring all of them to one rank. A sequence that fits nowhere goes
        on waiting for the same partition: others fill the rest meanwhile.
        """
        partitions = (each for each in self._blocks.tiers.partitions_for(sequence) if each not in self._kept)
        places = [self._place(sequence, partition) for partition in partitions]

        def preference(place: Place) -> tuple[bool, bool, bool, int]:
            is_awaited = place.partition == sequence.awaited_partition
            num_cached = place.prefix.num_blocks * self._blocks.num_groups
            return (
                place.has_room,
                place.will_have_room,
                is_awaited and not place.has_room,
                place.num_unheld - place.num_needed + num_cached,
            )

        return sorted(places, key=preference, reverse=True)

    def pass_over(self, sequence: Sequence, places: list[Place]) -> None:
        """Let later sequences start before one that has no room, and keep the best of its `places` for it."""
        self.passed.add(sequence.seq_id)
        if places:
            sequence.awaited_partition = places[0].partition
            self._kept.add(places[0].partition)

    def _place(self, sequence: Sequence, partition: int) -> Place:
        blocks, num_tokens = self._blocks, len(sequence.token_ids) + (sequence.pooling is None)
        num_free, num_unheld = blocks.pool.num_free_in(partition), blocks.pool.num_unheld_in(partition)
        prefix = Prefix(partition=partition)
        if not sequence.host_blocks:
            prefix = blocks.prefixes.find(sequence, partition)
        num_needed = blocks.num_blocks_to_open(prefix, num_tokens)
        if prefix.partial is not None and num_needed > num_free:
            # While it is copied, the source of a copy is held as well: one block more than there may be.
            prefix = prefix.without_partial()
            num_needed = blocks.num_blocks_to_open(prefix, num_tokens)
        num_blocks = blocks.pool.num_blocks_per_partition
        if num_unheld < num_blocks:  # sequences run there
            num_needed += int(WATERMARK * num_blocks)
        is_full, states = partition in self._full, blocks.state_slots
        return Place(
            prefix,
            num_needed,
            num_free,
            num_unheld,
            is_full,
            states.has_room,
            states.will_have_room,
            blocks.block_size,
        )
