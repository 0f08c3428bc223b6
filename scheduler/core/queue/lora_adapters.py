"""LoraAdapters: which adapters the ranks hold in host memory and in the slots of the device. Pure: no clock.

The ranks obey the orders that plans carry, so all of them hold the same adapters. An adapter is *queued* until host
memory has room for it, *loading* until every rank has reported, and then *ready*. A sequence whose adapter is not
ready or has no slot is parked: it keeps its place in the order of arrival, and others pass it.

Adapters share the slots by turns. While an adapter waits for a slot, the one that was granted its slot first yields:
it starts only as many new sequences as its turn has left, and loses the slot when the last of its rows is free. So a
stream of requests for some adapters does not keep the others out.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import numpy as np

from ....proto.block_tables import IntArray
from ....proto.codec import NO_INTS, NO_PAIRS
from ....proto.config import LoraConfig
from ....proto.errors import LoraLoadError
from ....proto.lora import MAX_REGISTERED_LORAS, LoraLoad, LoraReference, LoraReport, merge_references
from ....proto.stream import LoraLoaded
from ...sequences.sequence import Sequence
from .policy import by_precedence


class _State(Enum):
    QUEUED = auto()
    LOADING = auto()
    READY = auto()


@dataclass(slots=True, eq=False)
class _Adapter:
    """An adapter that requests use, or that host memory holds.

    Attributes:
        digests: rank |-> digest of the files that it read.
        num_users: sequences that have not ended.
        num_rows: those of them that run.
        parked: seq_id |-> sequence, in the order in which they were parked.
        granted_at, used_at: order of the grant of its slot, and of its latest use.
        turn_left: new sequences that may start before it yields its slot.
        has_served: a sequence has started since it was loaded.
        is_retired: it leaves host memory when nothing uses it any more.
        callers: gateway and query to answer when it is ready or has failed.
    """

    reference: LoraReference
    adapter_id: int
    state: _State = _State.QUEUED
    digests: dict[int, str] = field(default_factory=dict)
    slot: int | None = None
    num_users: int = 0
    num_rows: int = 0
    parked: dict[int, Sequence] = field(default_factory=dict)
    granted_at: int = 0
    used_at: int = 0
    turn_left: int = 0
    is_yielding: bool = False
    has_served: bool = False
    is_retired: bool = False
    callers: list[tuple[bytes, int]] = field(default_factory=list)

    @property
    def may_start_new(self) -> bool:
        """Return whether it has a slot for sequences that have not run before."""
        return self.slot is not None and (not self.is_yielding or self.turn_left > 0)

    @property
    def gives_up_slot(self) -> bool:
        """Return whether another adapter may take its slot."""
        return not self.num_rows and not (self.num_users and self.may_start_new)


class LoraAdapters:
    """The adapters of one replica.

    Args:
        num_ranks: that must report a load.
        turn_len: new sequences that an adapter may start while another one waits for its slot.

    Attributes:
        has_changed: parked sequences may be able to start; `unpark` looks.
    """

    def __init__(self, config: LoraConfig, num_ranks: int, turn_len: int) -> None:
        self.has_changed = False
        self._max_in_memory = config.max_cpu_loras
        self._num_ranks, self._turn_len = num_ranks, turn_len
        self._adapters: dict[LoraReference, _Adapter] = {}
        self._contents: OrderedDict[LoraReference, str] = (
            OrderedDict()
        )  # of those that were ready, the latest last
        self._by_id: dict[int, _Adapter] = {}  # those that are loading or ready
        self._slots: list[_Adapter | None] = [None] * config.max_loras
        self._queued: dict[LoraReference, _Adapter] = {}
        self._num_claims = 0  # ready adapters that waited for a slot at the last `unpark`
        self._ids, self._ticks = itertools.count(1), itertools.count(1)
        self._loads: dict[int, LoraLoad] = {}  # orders for the next plan
        self._drops: list[int] = []
        self._slot_orders: dict[int, int] = {}  # slot |-> adapter_id
        self._replies: list[tuple[bytes, LoraLoaded]] = []
        self._problems: list[str] = []
        self._registry: dict[
            str, LoraReference
        ] = {}  # name |-> latest reference; without a path once unloaded

    @property
    def registry(self) -> tuple[LoraReference, ...]:
        """Return the adapters that operators have loaded and unloaded, with their known contents, for gateways."""
        return tuple(
            replace(each, content=self.content_of(each)) if each in self._contents else each
            for each in self._registry.values()
        )

    def content_of(self, reference: LoraReference) -> str:
        """Return the digest of the files that the ranks have read for an adapter; empty before the first time."""
        return self._contents.get(reference, "")

    @property
    def is_loading(self) -> bool:
        """Return whether the ranks have orders to come or reports to make."""
        has_orders = bool(self._loads or self._drops or self._slot_orders)
        return has_orders or any(each.state is _State.LOADING for each in self._by_id.values())

    @property
    def num_in_memory(self) -> int:
        """Return the adapters that host memory holds, or will once they are read."""
        return len(self._by_id)

    @property
    def references(self) -> tuple[LoraReference, ...]:
        """Return the adapters that are ready."""
        return tuple(each.reference for each in self._by_id.values() if each.state is _State.READY)

    # Requests of operators

    def register(self, reference: LoraReference, caller: tuple[bytes, int] | None = None) -> None:
        """Load or unload an adapter, unless a later version of its name is known.

        Args:
            caller: gateway and query, whom `take_replies` tells; None if nobody waits.
        """
        previous = self._registry.get(reference.name)
        if not merge_references(self._registry, [reference]):
            if caller is not None:
                problem = "" if previous == reference else "another version of it was loaded meanwhile"
                self._reply(caller, problem)
            return
        if previous is not None and previous.path:
            self.unload(previous)
        if reference.path:
            self.load(reference, caller)
        elif caller is not None:
            self._reply(caller, "")

    def load(self, reference: LoraReference, caller: tuple[bytes, int] | None = None) -> None:
        """Have an adapter read; `take_replies` tells the caller the outcome."""
        adapter = self._find(reference)
        adapter.is_retired = False
        if caller is None:
            return
        if adapter.state is _State.READY:
            self._reply(caller, "")
        else:
            adapter.callers.append(caller)

    def unload(self, reference: LoraReference) -> None:
        """Drop an adapter once the sequences that use it have ended. Returns immediately."""
        adapter = self._adapters.get(reference)
        if adapter is not None:
            adapter.is_retired = True
            self._drop_if_retired(adapter)

    def take_replies(self) -> list[tuple[bytes, LoraLoaded]]:
        """Return the outcomes of loads that gateways wait for, and forget them."""
        replies, self._replies = self._replies, []
        return replies

    def take_problems(self) -> list[str]:
        """Return why loads have failed, for the log, and forget it."""
        problems, self._problems = self._problems, []
        return problems

    # Sequences

    def add(self, sequence: Sequence) -> None:
        """Count a sequence that uses an adapter, and have the adapter read if it is not."""
        if sequence.lora is not None:
            self._find(sequence.lora).num_users += 1

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended; it has no row."""
        if sequence.lora is None:
            return
        adapter = self._adapters[sequence.lora]
        adapter.num_users -= 1
        adapter.parked.pop(sequence.seq_id, None)
        self.has_changed = True
        self._drop_if_retired(adapter)

    def may_start(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence's adapter is in a slot, into which it is put if one is free."""
        if sequence.lora is None:
            return True
        adapter = self._adapters[sequence.lora]
        if adapter.state is _State.READY and adapter.slot is None and not self._num_claims:
            self._grant_slot(adapter)
        return adapter.slot is not None and (sequence.has_run or adapter.may_start_new)

    def park(self, sequence: Sequence) -> None:
        """Keep a sequence that may not start until `unpark` returns it."""
        assert sequence.lora is not None, f"sequence {sequence.seq_id} has no adapter"
        self._adapters[sequence.lora].parked[sequence.seq_id] = sequence
        self.has_changed = True

    def unpark(self) -> list[Sequence]:
        """Share the slots among the adapters of parked sequences; return the sequences that may start now."""
        if not self.has_changed:
            return []
        self.has_changed = False
        self._load_queued()
        parked = [each for each in self._adapters.values() if each.parked and each.state is _State.READY]
        parked.sort(key=lambda each: by_precedence(next(iter(each.parked.values()))))
        claims = [each for each in parked if each.slot is None and not self._grant_slot(each)]
        self._num_claims = len(claims)
        holders = [each for each in self._slots if each is not None]
        holders.sort(key=lambda each: each.granted_at)
        for index, holder in enumerate(holders):
            holder.is_yielding = index < len(claims)
        released: list[Sequence] = []
        for adapter in parked:
            if adapter.may_start_new:
                count = adapter.turn_left if adapter.is_yielding else len(adapter.parked)
                for seq_id in list(itertools.islice(adapter.parked, count)):
                    released.append(adapter.parked.pop(seq_id))
        return released

    def on_start(self, sequence: Sequence) -> None:
        """Count a sequence that got a row."""
        if sequence.lora is None:
            return
        adapter = self._adapters[sequence.lora]
        adapter.num_rows += 1
        adapter.has_served = True
        adapter.used_at = next(self._ticks)
        if not sequence.has_run:
            adapter.turn_left = max(0, adapter.turn_left - 1)

    def on_release(self, sequence: Sequence) -> None:
        """Count a sequence that lost its row."""
        if sequence.lora is None:
            return
        adapter = self._adapters[sequence.lora]
        adapter.num_rows -= 1
        self.has_changed |= adapter.num_rows == 0

    def slot_of(self, sequence: Sequence) -> int | None:
        """Return the slot of a running sequence's adapter; None if it has no adapter."""
        return None if sequence.lora is None else self._adapters[sequence.lora].slot

    # Ranks

    def take_orders(self) -> tuple[tuple[LoraLoad, ...], IntArray, IntArray]:
        """Return the loads, drops and slots for the next plan, and forget them."""
        if not (self._loads or self._drops or self._slot_orders):
            return (), NO_INTS, NO_PAIRS
        loads, drops = tuple(self._loads.values()), np.array(self._drops, np.int32)
        slots = np.array([*self._slot_orders.items()], np.int32).reshape(-1, 2)
        self._loads, self._drops, self._slot_orders = {}, [], {}
        return loads, drops, slots

    def on_reports(self, reports: Iterable[LoraReport]) -> dict[LoraReference, LoraLoadError]:
        """Apply the reports of ranks; return the adapters that have failed, whose users must be ended."""
        failed = {}
        for report in reports:
            adapter = self._by_id.get(report.adapter_id)
            if adapter is None or adapter.state is not _State.LOADING:
                continue  # dropped, or failed on another rank
            error = report.error
            adapter.digests[report.rank] = report.digest
            if not error and len(set(adapter.digests.values())) > 1:
                error = "its files differ between the nodes of the ranks"
            elif not error and self._contents.get(adapter.reference, report.digest) != report.digest:
                error = "its files have changed since they were read first: load it again"
            if error:
                failed[adapter.reference] = self._fail(adapter, error)
            elif len(adapter.digests) == self._num_ranks:
                self._note_content(adapter.reference, report.digest)
                self._on_ready(adapter)
        return failed

    def reset(self) -> None:
        """Have all adapters read anew: the worker group failed, and its ranks forget them. No sequence has a row."""
        self._loads, self._drops, self._slot_orders = {}, [], {}
        for adapter in list(self._by_id.values()):
            self._forget_load(adapter)
            self._queue(adapter)
        self._load_queued()
        self.has_changed = True

    def check_integrity(self, alive: Iterable[Sequence]) -> None:
        """Recount users, rows and slots. Raises AssertionError at the first inconsistency."""
        users: dict[LoraReference, list[Sequence]] = {}
        for sequence in alive:
            if sequence.lora is not None:
                users.setdefault(sequence.lora, []).append(sequence)
        assert users.keys() <= self._adapters.keys(), "a sequence uses an unknown adapter"
        for reference, adapter in self._adapters.items():
            own = users.get(reference, [])
            name, num_rows = reference.name, sum(sequence.row is not None for sequence in own)
            assert adapter.num_users == len(own), f"users of adapter {name} are miscounted"
            assert adapter.num_rows == num_rows, f"rows of adapter {name} are miscounted"
            assert not num_rows or adapter.slot is not None, f"adapter {name} runs without a slot"
            assert adapter.slot is None or self._slots[adapter.slot] is adapter, f"{name} has no slot"
            assert adapter.parked.keys() <= {each.seq_id for each in own}, f"{name} parks ended sequences"
        assert len(self._by_id) <= self._max_in_memory, "too many adapters are in memory"
        kept = {each.reference for each in (*self._by_id.values(), *self._queued.values())}
        assert kept == self._adapters.keys(), "an adapter is neither in memory nor queued"

    # Details

    def _note_content(self, reference: LoraReference, digest: str) -> None:
        self._contents[reference] = digest
        self._contents.move_to_end(reference)
        if len(self._contents) > 2 * MAX_REGISTERED_LORAS:
            self._contents.popitem(last=False)

    def _find(self, reference: LoraReference) -> _Adapter:
        adapter = self._adapters.get(reference)
        if adapter is None:
            adapter = self._adapters[reference] = _Adapter(reference, 0)
            self._queue(adapter)
            self._load_queued()
        adapter.used_at = next(self._ticks)
        return adapter

    def _queue(self, adapter: _Adapter) -> None:
        adapter.state = _State.QUEUED
        self._queued[adapter.reference] = adapter

    def _load_queued(self) -> None:
        """Order loads while host memory has room; an adapter without users, or that has served, makes room."""
        for reference in list(self._queued):
            if len(self._by_id) >= self._max_in_memory and not self._evict():
                return
            adapter = self._queued.pop(reference)
            adapter.adapter_id, adapter.state = next(self._ids), _State.LOADING
            self._by_id[adapter.adapter_id] = adapter
            self._loads[adapter.adapter_id] = LoraLoad(adapter.adapter_id, reference.path)

    def _evict(self) -> bool:
        candidates = [
            each
            for each in self._by_id.values()
            if each.state is _State.READY and not each.num_rows and (each.has_served or not each.num_users)
        ]
        oldest = min(candidates, key=lambda each: each.used_at, default=None)
        if oldest is None:
            return False
        self._drop(oldest)
        if oldest.num_users:
            self._queue(oldest)
        else:
            del self._adapters[oldest.reference]
        return True

    def _drop(self, adapter: _Adapter) -> None:
        """Take an adapter out of the memory of the ranks."""
        if self._loads.pop(adapter.adapter_id, None) is None:
            self._drops.append(adapter.adapter_id)
        self._forget_load(adapter)

    def _forget_load(self, adapter: _Adapter) -> None:
        del self._by_id[adapter.adapter_id]
        self._take_slot(adapter)
        adapter.digests, adapter.has_served = {}, False

    def _take_slot(self, adapter: _Adapter) -> None:
        if adapter.slot is not None:
            self._slots[adapter.slot] = None
            self._slot_orders.pop(adapter.slot, None)
            adapter.slot, adapter.is_yielding = None, False

    def _drop_if_retired(self, adapter: _Adapter) -> None:
        if not adapter.is_retired or adapter.num_users:
            return
        del self._adapters[adapter.reference]
        if self._queued.pop(adapter.reference, None) is None:
            self._drop(adapter)
        for caller in adapter.callers:
            self._reply(caller, "the adapter was unloaded")
        self.has_changed = True

    def _grant_slot(self, adapter: _Adapter) -> bool:
        """Put a ready adapter into a slot that is free or whose adapter gives it up."""
        slot = next((index for index, holder in enumerate(self._slots) if holder is None), None)
        if slot is None:
            idle = [each for each in self._slots if each is not None and each.gives_up_slot]
            oldest = min(idle, key=lambda each: each.used_at, default=None)
            if oldest is None:
                return False
            assert oldest.slot is not None
            slot = oldest.slot
            self._take_slot(oldest)
        adapter.slot, adapter.turn_left, adapter.granted_at = slot, self._turn_len, next(self._ticks)
        self._slots[slot], self._slot_orders[slot] = adapter, adapter.adapter_id
        return True

    def _on_ready(self, adapter: _Adapter) -> None:
        adapter.state = _State.READY
        for caller in adapter.callers:
            self._reply(caller, "")
        adapter.callers = []
        self.has_changed = True

    def _fail(self, adapter: _Adapter, problem: str) -> LoraLoadError:
        reference = adapter.reference
        error = LoraLoadError(f"adapter {reference.name!r} in {reference.path} cannot be loaded: {problem}")
        self._problems.append(str(error))
        self._drop(adapter)
        self._queued[reference] = adapter  # until its users have ended
        adapter.state, adapter.is_retired = _State.QUEUED, True
        for caller in adapter.callers:
            self._reply(caller, str(error))
        adapter.callers = []
        self._drop_if_retired(adapter)
        return error

    def _reply(self, caller: tuple[bytes, int], error: str) -> None:
        gateway, query_id = caller
        self._replies.append((gateway, LoraLoaded(query_id, error)))
