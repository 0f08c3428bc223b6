"""StateSlots: the states of rows, and snapshots of states that prefixes have led to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...proto.block_tables import BlockTables, IntArray
from ...proto.codec import NO_INTS, NO_PAIRS
from ..sequences.sequence import Sequence
from .block_pool import BlockPool
from .cache_events import CacheKey
from .planned_moves import PendingFills
from .snapshot_policy import SharedPrompts, snapshot_value

# Snapshots of which the one with the least value is dropped: the longest unused ones.
NUM_COMPARED = 64


class StateMoves(NamedTuple):
    """The moves of states in a plan; see StepPlan."""

    copies: IntArray = NO_PAIRS
    saves: IntArray = NO_PAIRS
    swap_out: IntArray = NO_PAIRS
    swap_in: IntArray = NO_PAIRS
    save_tails: IntArray = NO_INTS


@dataclass(slots=True)
class _Snapshot:
    """A state that a prefix has led to.

    Attributes:
        key: as of a cached block: the last digest is that of the whole prefix. The tokens are those after the last
            full block, or empty.
        num_saved_tokens: as in snapshot_value.
    """

    key: CacheKey
    num_saved_tokens: int
    num_hits: int
    value: float


class StateSlots:
    """The owner of the slots for the states of layers that keep one of each sequence.

    A state changes in place with every token, so that sharing one is a copy. A row holds one slot, which no other row
    has. A *snapshot* is a slot that no step writes any more; its prefix is found by its digest, like a block. Both
    are blocks of one BlockPool: rows' slots are held, snapshots are cached, and slot 0 is scratch for padding.

    A snapshot that the device has no room for goes to host memory, if it is worth more than one there, and a row that
    starts from it gets a copy. The state of a preempted sequence goes there as well, and is held. The *place* of a
    snapshot is its slot, or its number in host memory plus `num_slots`.

    Args:
        tables: has the slot of each row.
        num_slots: slot 0 included; 0 for a model without states.
        num_host_slots: for snapshots in host memory.
        is_dead: whether the blocks of a prefix, by the digest of its last full block, were evicted: a snapshot alone
            is of no use.

    Attributes:
        num_saved: snapshots made by a copy.
    """

    def __init__(
        self, tables: BlockTables, num_slots: int, num_host_slots: int, is_dead: Callable[[bytes], bool]
    ) -> None:
        self._tables, self._is_dead = tables, is_dead
        self.is_on = num_slots > 0
        self._num_places = max(1, num_slots)  # on the device
        self._pool = BlockPool(self._num_places, self._on_evict)
        self._host = BlockPool(1 + num_host_slots, self._on_evict)
        self._snapshots: dict[int, _Snapshot] = {}  # place |-> snapshot
        self._slot_of: dict[bytes, int] = {}  # digest |-> place of the snapshot after full blocks
        self._tails: dict[bytes, list[int]] = {}  # parent's digest |-> places of those within the next block
        self._clock = 0.0
        self._copies: list[tuple[int, int]] = []
        self._swap_outs: list[tuple[int, int]] = []
        self._swap_ins: list[tuple[int, int]] = []
        self._held_on_host: list[int] = []  # until the plan is made: no other move of the plan may take them
        self._wanted: list[tuple[int, CacheKey, int, int]] = []  # arguments of `save`
        self._held: list[int] = []  # until the plan is made
        self._pending = PendingFills()
        self._prompts = SharedPrompts()
        self._planned_step = self._done_step = 0
        self.num_saved = 0

    @property
    def num_slots(self) -> int:
        """Return the slots for sequences and snapshots: all except the scratch slot."""
        return self._pool.num_blocks

    @property
    def num_held(self) -> int:
        return self._pool.num_held

    @property
    def num_snapshots(self) -> int:
        return self._pool.num_cached

    @property
    def num_host_slots(self) -> int:
        return self._host.num_blocks

    @property
    def num_host_snapshots(self) -> int:
        """Return the snapshots in host memory."""
        return sum(place >= self._num_places for place in self._snapshots)

    @property
    def num_fenced(self) -> int:
        return self._pool.num_fenced

    @property
    def has_room(self) -> bool:
        """Return whether a row can open now."""
        return not self.is_on or (self._pool.num_free > 0 and self._may_open)

    @property
    def will_have_room(self) -> bool:
        """Return whether a row can open once the steps in flight are done."""
        return not self.is_on or (self._pool.num_unheld_in(0) > 0 and self._may_open)

    @property
    def _may_open(self) -> bool:
        """Return whether one more row leaves the snapshots their part of the slots."""
        num_rows = int(np.count_nonzero(self._tables.state_slots))
        return num_rows == 0 or num_rows + self._prompts.num_reserved(self.num_slots) < self.num_slots

    def slot_of(self, row: int) -> int:
        """Return the slot of a row's state; 0 for a model without states."""
        return int(self._tables.state_slots[row])

    def states(self, slots: range) -> bytes:
        """Return a BlockState for each slot: rows' slots are held, snapshots are cached."""
        return self._pool.states(slots)

    # Rows

    def count_prompt(self, num_tokens: int, num_shared_tokens: int) -> None:
        """Count a prompt that starts, of which blocks have the first tokens, with a snapshot or without one."""
        self._prompts.count(num_tokens, num_shared_tokens)

    def open(self, row: int, snapshot: int | None) -> None:
        """Give an empty row a slot, into which the plan copies a snapshot, if there is one."""
        if not self.is_on:
            return
        if snapshot is None:
            slot = self._allocate()
        elif snapshot >= self._num_places:
            self._count_hit(snapshot)
            slot = self._swap_in(snapshot - self._num_places)
        elif self._pool.num_free == 1 and self._pool.is_cached(snapshot):
            # It is the last slot: the row takes it, and overwrites the snapshot.
            self._pool.share([snapshot])
            self._forget(snapshot)
            self._pool.forget_blocks([snapshot])
            slot = snapshot
        else:
            slot = self._copy_of(snapshot)
            self._count_hit(snapshot)
        self._tables.put_state(row, slot)

    def open_fork(self, row: int, source_row: int) -> None:
        """Give an empty row a copy of another row's state, as it is before the plan's step."""
        if self.is_on:
            self._tables.put_state(row, self._copy_of(self.slot_of(source_row)))

    def close(self, row: int, fence_step: int | None) -> None:
        """Release a row's slot; the caller removes it from the tables."""
        if self.is_on:
            self._pool.release([self.slot_of(row)], fence_step)

    # States of preempted sequences

    @property
    def has_host_room(self) -> bool:
        """Return whether a row's state can move to host memory, in place of a snapshot if need be."""
        return self._host.num_free > 0

    def swap_out(self, row: int) -> int:
        """Copy a row's state to host memory before the next plan's step; return the slot there, which is held.

        The row is to be closed. There must be room.
        """
        host_slot = self._hold_host_slot()
        self._swap_outs.append((self.slot_of(row), host_slot))
        return host_slot

    def swap_in(self, row: int, host_slot: int) -> None:
        """Give an empty row a slot, into which the plan copies a state of `swap_out`, whose slot is released then."""
        self._held_on_host.append(host_slot)
        slot = self._allocate()
        self._swap_ins.append((host_slot, slot))
        self._tables.put_state(row, slot)

    def drop(self, host_slot: int) -> None:
        """Release a slot of `swap_out`: the sequence has ended, or the state is void."""
        self._swap_outs = [pair for pair in self._swap_outs if pair[1] != host_slot]
        self._host.release([host_slot], None)

    # Files, which are read into held slots of the host memory and written from them

    @property
    def room(self) -> tuple[int, int]:
        """Return all slots in host memory, and those that can be held."""
        return self._host.num_blocks, self._host.num_free

    def has(self, digest: bytes) -> bool:
        """Return whether there is a snapshot after the full blocks up to a digest."""
        return digest in self._slot_of

    def reserve(self, num_slots: int) -> list[int] | None:
        """Hold slots in host memory for states that are read, if need be those of the least snapshots there.

        Returns None if too few can be held.
        """
        if num_slots > self._host.num_free:
            return None
        return [self._hold_host_slot() for _ in range(num_slots)]

    def copy_to_host(self, digest: bytes) -> int | None:
        """Hold a slot in host memory that has a snapshot, or gets it with the next plan; None without either.

        No step may be in flight.
        """
        place = self._slot_of.get(digest)
        if place is None:
            return None
        if place >= self._num_places:
            self._host.share([place - self._num_places])
            return place - self._num_places
        if not self._host.num_free:
            return None
        host_slot = self._hold_host_slot()
        self._swap_outs.append((place, host_slot))
        return host_slot

    def fill(self, digest: bytes, host_slot: int, num_saved_tokens: int) -> None:
        """List a held slot, which has a state that was read, unless there is a snapshot of its prefix already."""
        if digest not in self._slot_of:
            value = snapshot_value(num_saved_tokens, 0, self._clock)
            snapshot = _Snapshot((digest, digest, b""), num_saved_tokens, 0, value)
            self._put(self._num_places + host_slot, snapshot)
            self._host.keep_content([host_slot])

    def hold(self, host_slots: list[int]) -> None:
        """Protect slots in host memory until `release`."""
        self._host.share(host_slots)

    def release(self, host_slots: list[int]) -> None:
        self._host.release(host_slots, None)

    # Transfers, which read snapshots and fill slots of the device

    @property
    def has_loads(self) -> bool:
        """Return whether the next plan fills slots from host memory."""
        return bool(self._swap_ins)

    def lend(self, digest: bytes) -> tuple[int, bool] | None:
        """Hold a slot that has a snapshot, or gets it from host memory with the next plan: then the second is true.

        Returns None if there is no snapshot, or no slot for it.
        """
        place = self._slot_of.get(digest)
        if place is None:
            return None
        if place < self._num_places:
            self._pool.share([place])
            return place, False
        if not self._pool.num_free:
            return None
        slot = self._swap_in(place - self._num_places)
        self._pool.share([slot])
        self._held.append(slot)  # the plan fills it even if the loan ends before
        return slot, True

    def take_slot(self) -> int | None:
        """Hold a free slot, if need be that of the least snapshot, for a state that ranks read.

        Returns None if that would leave none to the sequence that waits for it.
        """
        return self._allocate() if self._pool.num_free > 1 else None

    def publish_pulled(self, slot: int, digest: bytes, num_saved_tokens: int) -> None:
        """List a held slot, which has a state that ranks have read, unless there is such a snapshot already."""
        if digest not in self._slot_of:
            self._add(slot, (digest, digest, b""), num_saved_tokens)

    def end_loan(self, slot: int, fence_step: int | None) -> None:
        """Release a slot of `lend`."""
        self._pool.release([slot], fence_step)

    def end_pull(self, slot: int) -> None:
        """Release a slot of `take_slot`; a step in flight may have copied it for a row."""
        is_in_flight = self._planned_step > self._done_step
        self._pool.release([slot], self._planned_step if is_in_flight else None)

    # Snapshots

    def save(self, row: int, key: CacheKey, num_saved_tokens: int, tail: int = 0) -> None:
        """Save a row's state in the next plan's step, if there is a slot when the plan is made.

        Sequences that start in the same plan take their slots before. They cannot start from this snapshot.

        Args:
            key: digest of the prefix, twice, and no tokens: it ends with a full block.
            tail: tokens of the step behind the prefix.
        """
        self._wanted.append((row, key, num_saved_tokens, tail))

    def keep(self, row: int, key: CacheKey, num_saved_tokens: int, newest_step: int | None) -> None:
        """Make a row's slot a snapshot, without a copy: the row is to be closed, and steps in flight end its prefix.

        Args:
            key: digest of the prefix, digest of its last full block, and the tokens after that block.
            newest_step: newest step in flight, which may still change the state; None if none is in flight.
        """
        slot = self.slot_of(row)
        if self._find(key) is not None:
            return
        self._add(slot, key, num_saved_tokens)
        if newest_step is not None:
            self._pending.add(newest_step, [slot], [])

    def candidates(
        self, sequence: Sequence, digests: list[bytes], tokens: bytes, block_size: int
    ) -> Iterator[tuple[int, int, int]]:
        """Yield the snapshots of prefixes of a sequence as (full blocks, tokens after these, place), longest first.

        Args:
            digests: of the full blocks in question.
            tokens: all tokens in question, int32.
        """
        if not self._snapshots:
            return
        for count in range(len(digests), -1, -1):
            digest = digests[count - 1] if count else sequence.root
            parent = sequence.parent_of_block(count, block_size)
            found = [(self._snapshots[slot].key[2], slot) for slot in self._tails.get(parent, ())]
            for tail, slot in sorted(found, key=lambda each: -len(each[0])):
                if tokens.startswith(tail, 4 * count * block_size):
                    yield count, len(tail) // 4, slot
            whole = self._slot_of.get(digest)
            if whole is not None:
                yield count, 0, whole

    # Plans

    def take(self, step_id: int) -> StateMoves:
        """Return and clear the moves before and after step `step_id`."""
        self._planned_step = step_id
        if not (self._copies or self._wanted or self._swap_outs or self._swap_ins):
            return StateMoves()
        found = [save for each in self._wanted for save in self._allocate_save(*each)]
        saves, tails = [(source, slot) for source, slot, _ in found], [tail for _, _, tail in found]
        moves = StateMoves(*map(_pairs, (self._copies, saves, self._swap_outs, self._swap_ins)))
        if any(tails):
            moves = moves._replace(save_tails=np.array(tails, np.int32))
        self._pending.add(step_id, [slot for _, slot in saves], [slot for _, slot in self._swap_outs])
        self._release_held(step_id)
        self.num_saved += len(saves)
        return moves

    def free_fenced(self, step_id: int) -> None:
        self._done_step = max(self._done_step, step_id)
        self._pool.free_fenced(step_id)

    # Failures

    def confirm(self, step_id: int) -> None:
        """Record that all ranks have done the steps up to `step_id`."""
        self._pending.confirm(step_id)

    def forget_unconfirmed(self) -> set[int]:
        """Forget the planned copies, and the snapshots that steps without a result were to save. No row may be open.

        A step changes states in place, so the states of its rows are void after a failure; snapshots are not.

        Returns:
            The slots in host memory whose content is void.
        """
        slots, host_slots = self._pending.take()
        host_slots.update(slot for _, slot in self._swap_outs)
        self._release_held(None)
        for place in (slots | {self._num_places + slot for slot in host_slots}) & self._snapshots.keys():
            self._forget(place)
        self._pool.forget_blocks(slots)
        self._host.forget_blocks(host_slots)
        return host_slots

    def flush(self) -> None:
        """Forget all snapshots on the device. Slots of rows stay with them."""
        for place in [place for place in self._snapshots if place < self._num_places]:
            self._forget(place)
        self._pool.forget_content()

    def flush_host(self) -> None:
        """Forget all snapshots in host memory."""
        for place in [place for place in self._snapshots if place >= self._num_places]:
            self._forget(place)
        self._host.forget_content()

    def check_integrity(
        self, rows: list[int], host_states: list[int], for_files: list[int], in_transfers: list[int]
    ) -> None:
        """Recount the pools. Raises AssertionError at any difference.

        Args:
            rows: that have sequences.
            host_states: slots in host memory with the states of preempted sequences.
            for_files: slots in host memory that files hold, as often as they do.
            in_transfers: slots that leases and pulls hold, as often as they do.
        """
        slots = self._tables.state_slots
        assert np.count_nonzero(slots) == (len(rows) if self.is_on else 0), "rows have no state or too many"
        held = dict[int, int]()
        for slot in (*(slots[rows].tolist() if self.is_on else ()), *self._held, *in_transfers):
            held[slot] = held.get(slot, 0) + 1
        self._pool.check_integrity(held)
        held_on_host = dict[int, int]()
        assert len(set(host_states)) == len(host_states), "two sequences have the same state in host memory"
        for slot in (*self._held_on_host, *host_states, *for_files):
            held_on_host[slot] = held_on_host.get(slot, 0) + 1
        self._host.check_integrity(held_on_host)
        own = slots[rows].tolist()
        assert len(set(own)) == len(own) or not self.is_on, "two rows have the same state"
        tails = {slot for slots_of in self._tails.values() for slot in slots_of}
        whole = set(self._slot_of.values())
        assert not tails & whole, "a snapshot is in two indices"
        assert tails | whole == self._snapshots.keys(), "the indices lack snapshots"
        assert all(self._find(each.key) == slot for slot, each in self._snapshots.items())

    # Details

    def _allocate(self) -> int:
        """Return a free slot, if need be that of the snapshot with the least value among the oldest."""
        if self._pool.num_free == self._pool.num_cached:
            victim = min(self._pool.oldest_cached(NUM_COMPARED), key=self._value)
            self._clock = max(self._clock, self._snapshots[victim].value)
            self._move_to_host(victim)
            self._pool.forget_blocks([victim])
        (slot,) = self._pool.allocate(1)
        return slot

    def _move_to_host(self, victim: int) -> None:
        """Forget a snapshot on the device, and keep it in host memory if it is worth more than one there."""
        value, snapshot = self._value(victim), self._forget(victim)
        if value < 0 or not self._has_host_room(value):
            return
        (slot,) = self._host.allocate(1)
        self._held_on_host.append(slot)
        self._swap_outs.append((victim, slot))
        self._put(self._num_places + slot, snapshot)
        self._host.keep_content([slot])

    def _has_host_room(self, value: float) -> bool:
        """Return whether a slot in host memory is free, after a snapshot of less value is dropped if need be."""
        if self._host.num_free > self._host.num_cached:
            return True
        if not self._host.num_free:
            return False
        oldest = self._host.oldest_cached(NUM_COMPARED)
        victim = min(oldest, key=lambda slot: self._value(self._num_places + slot))
        if self._value(self._num_places + victim) >= value:
            return False
        self._forget(self._num_places + victim)
        self._host.forget_blocks([victim])
        return True

    def _hold_host_slot(self) -> int:
        """Return a slot in host memory, of which there must be one, if need be that of the least snapshot."""
        has_room = self._has_host_room(math.inf)
        assert has_room, "there is no room for a state in host memory"
        (host_slot,) = self._host.allocate(1)
        return host_slot

    def _swap_in(self, source: int) -> int:
        """Return a new slot into which the plan copies slot `source` of the host memory."""
        self._host.share([source])
        self._held_on_host.append(source)
        slot = self._allocate()
        self._swap_ins.append((source, slot))
        return slot

    def _count_hit(self, place: int) -> None:
        found = self._snapshots[place]
        found.num_hits += 1
        found.value = snapshot_value(found.num_saved_tokens, found.num_hits, self._clock)

    def _value(self, slot: int) -> float:
        snapshot = self._snapshots[slot]
        parent = snapshot.key[1]
        return -1.0 if self._is_dead(parent) else snapshot.value

    def _on_evict(self, slot: int) -> None:
        raise AssertionError(f"slot {slot} was evicted by age")

    def _allocate_save(
        self, row: int, key: CacheKey, num_saved_tokens: int, tail: int
    ) -> list[tuple[int, int, int]]:
        """Return the slot of a row, one for its snapshot, and the tail; nothing without a slot or a need of one."""
        if key[0] in self._slot_of or self._pool.num_free == 0:
            return []
        slot = self._allocate()
        self._add(slot, key, num_saved_tokens)
        self._held.append(slot)
        return [(self.slot_of(row), slot, tail)]

    def _copy_of(self, source: int) -> int:
        """Return a new slot into which the plan copies `source`."""
        self._pool.share([source])
        self._held.append(source)
        slot = self._allocate()
        self._copies.append((source, slot))
        return slot

    def _add(self, slot: int, key: CacheKey, num_saved_tokens: int) -> None:
        value = snapshot_value(num_saved_tokens, 0, self._clock)
        self._put(slot, _Snapshot(key, num_saved_tokens, 0, value))
        self._pool.keep_content([slot])

    def _put(self, place: int, snapshot: _Snapshot) -> None:
        self._snapshots[place] = snapshot
        digest, parent, tokens = snapshot.key
        if tokens:
            self._tails.setdefault(parent, []).append(place)
        else:
            self._slot_of[digest] = place

    def _find(self, key: CacheKey) -> int | None:
        if not key[2]:
            return self._slot_of.get(key[0])
        slots = self._tails.get(key[1], ())
        return next((slot for slot in slots if self._snapshots[slot].key[0] == key[0]), None)

    def _forget(self, place: int) -> _Snapshot:
        snapshot = self._snapshots.pop(place)
        digest, parent, tokens = snapshot.key
        if not tokens:
            del self._slot_of[digest]
            return snapshot
        self._tails[parent].remove(place)
        if not self._tails[parent]:
            del self._tails[parent]
        return snapshot

    def _release_held(self, fence_step: int | None) -> None:
        self._copies, self._wanted, self._swap_outs, self._swap_ins = [], [], [], []
        self._pool.release(self._held, fence_step)
        self._host.release(self._held_on_host, None)  # a later plan's moves come after this plan's
        self._held, self._held_on_host = [], []


def _pairs(moves: list[tuple[int, int]]) -> IntArray:
    return np.array(moves, np.int32) if moves else NO_PAIRS
