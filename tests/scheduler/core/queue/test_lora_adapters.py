"""LoraAdapters: loads, slots, turns, and what ranks report."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from quire.proto.config import LoraConfig
from quire.proto.lora import LoraReference, LoraReport, merge_references
from quire.proto.sampling import SamplingParams
from quire.proto.stream import LoraLoaded
from quire.scheduler.core.queue.lora_adapters import LoraAdapters
from quire.scheduler.sequences.sequence import Sequence

A, B, C, D = (LoraReference(name, f"/adapters/{name}") for name in "abcd")


class Fleet:
    """LoraAdapters with a queue of waiting sequences and as many rows as wanted."""

    def __init__(
        self, max_loras: int = 1, max_cpu_loras: int = 4, num_ranks: int = 1, turn_len: int = 2
    ) -> None:
        self.lora = LoraAdapters(
            LoraConfig(max_loras=max_loras, max_lora_rank=8, max_cpu_loras=max_cpu_loras), num_ranks, turn_len
        )
        self.num_ranks = num_ranks
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_sequences = 0
        self.loaded: dict[int, str] = {}  # adapter_id |-> path, on the ranks
        self.slots: dict[int, str] = {}  # slot |-> path

    def submit(self, reference: LoraReference | None) -> Sequence:
        self.num_sequences += 1
        sequence = Sequence(
            self.num_sequences, self.num_sequences, b"", 1, "", SamplingParams(), 0, 1, 10, array("i", [1]), (),
            0.0, lora=reference,
        )  # fmt: skip
        self.lora.add(sequence)
        self.waiting.append(sequence)
        return sequence

    def step(self, reports: bool = True) -> list[str]:
        """Start what may start, and execute the orders; return the names of the started adapters."""
        self.waiting += self.lora.unpark()
        self.waiting.sort(key=lambda sequence: sequence.arrival)
        started = []
        for sequence in tuple(self.waiting):
            self.waiting.remove(sequence)
            if not self.lora.may_start(sequence):
                self.lora.park(sequence)
                continue
            self.lora.on_start(sequence)
            sequence.row, sequence.has_run = 1, True
            self.running.append(sequence)
            started.append("" if sequence.lora is None else sequence.lora.name)
        loads, drops, slots = self.lora.take_orders()
        for adapter_id in drops.tolist():
            del self.loaded[adapter_id]
        self.loaded |= {load.adapter_id: load.path for load in loads}
        self.slots |= {slot: self.loaded[adapter_id] for slot, adapter_id in slots.tolist()}
        for sequence in self.running:
            slot = self.lora.slot_of(sequence)
            assert sequence.lora is None or self.slots[slot or 0] == sequence.lora.path
        if reports:
            self.report(load.adapter_id for load in loads)
        self.check()
        return started

    def report(self, ids: Iterable[int], error: str = "") -> dict[LoraReference, str]:
        reports = [
            LoraReport(rank, adapter_id, "" if error else "digest", error)
            for adapter_id in ids
            for rank in range(self.num_ranks)
        ]
        return {reference: str(each) for reference, each in self.lora.on_reports(reports).items()}

    def end(self, sequence: Sequence) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
            sequence.row = None
            self.lora.on_release(sequence)
        self.lora.discard(sequence)
        if sequence in self.waiting:
            self.waiting.remove(sequence)

    def check(self) -> None:
        parked = [s for each in self.lora._adapters.values() for s in each.parked.values()]
        self.lora.check_integrity([*self.waiting, *self.running, *parked])


def test_sequence_waits_until_every_rank_has_read_its_adapter() -> None:
    fleet = Fleet(num_ranks=2)
    fleet.submit(A)
    fleet.submit(None)
    assert fleet.step(reports=False) == [""]
    (adapter_id,) = fleet.loaded
    fleet.lora.on_reports([LoraReport(0, adapter_id, "digest")])
    assert fleet.lora.is_loading
    assert fleet.step() == []
    fleet.lora.on_reports([LoraReport(1, adapter_id, "digest")])
    assert fleet.step() == ["a"]
    assert not fleet.lora.is_loading


def test_gateways_learn_the_content_of_an_adapter_that_was_read() -> None:
    fleet = Fleet(num_ranks=2)
    fleet.lora.register(A)
    fleet.step()
    assert [each.content for each in fleet.lora.registry] == ["digest"]
    registry = {A.name: A}
    assert merge_references(registry, fleet.lora.registry) == [], "what is known is not loaded again"
    assert registry[A.name].content == "digest"
    assert registry[A.name] == A
    assert registry[A.name].cache_key != A.cache_key
    assert registry[A.name].identity == A.identity


def test_files_that_changed_since_they_were_read_fail_the_load() -> None:
    fleet = Fleet(num_ranks=1)
    sequence = fleet.submit(A)
    fleet.step()
    fleet.lora.reset()
    fleet.step(reports=False)
    (adapter_id,) = list(fleet.loaded)[-1:]
    failed = fleet.lora.on_reports([LoraReport(0, adapter_id, "changed")])
    assert "its files have changed since they were read first" in str(failed[A])
    fleet.end(sequence)


def test_ranks_with_different_files_fail_the_load() -> None:
    fleet = Fleet(num_ranks=2)
    sequence = fleet.submit(A)
    fleet.step(reports=False)
    (adapter_id,) = fleet.loaded
    failed = fleet.lora.on_reports([LoraReport(0, adapter_id, "one"), LoraReport(1, adapter_id, "other")])
    assert "its files differ between the nodes of the ranks" in str(failed[A])
    fleet.end(sequence)
    fleet.step()
    assert fleet.loaded == {}
    assert fleet.lora.num_in_memory == 0


def test_failed_load_answers_its_caller_and_is_tried_again_by_the_next_request() -> None:
    fleet = Fleet()
    fleet.lora.load(A, (b"gateway", 7))
    sequence = fleet.submit(A)
    fleet.step(reports=False)
    (error,) = fleet.report(list(fleet.loaded), "no such directory").values()
    assert error == "adapter 'a' in /adapters/a cannot be loaded: no such directory"
    assert fleet.lora.take_replies() == [(b"gateway", LoraLoaded(7, error))]
    fleet.end(sequence)
    fleet.submit(A)
    fleet.step()
    assert fleet.step() == ["a"]


def test_unused_slot_goes_to_the_next_adapter_and_least_recently_used_leaves_memory() -> None:
    fleet = Fleet(max_loras=1, max_cpu_loras=2)
    for reference in (A, B, A, C):
        sequence = fleet.submit(reference)
        fleet.step()
        started = fleet.step() or [sequence.lora.name if sequence in fleet.running and sequence.lora else ""]
        assert started == [reference.name]
        fleet.end(sequence)
    fleet.step()
    assert sorted(fleet.loaded.values()) == [A.path, C.path]


def test_stream_of_one_adapter_does_not_keep_another_out() -> None:
    """Each adapter starts turn_len sequences while the other waits, in the order of arrival."""
    fleet = Fleet(max_loras=1, turn_len=2)
    for reference in (A, A, A, B, A, A, A):
        fleet.submit(reference)
    order: list[str] = []
    for _ in range(40):
        order += fleet.step()
        for sequence in tuple(fleet.running):
            fleet.end(sequence)
    assert sorted(order) == ["a"] * 6 + ["b"]
    assert order.index("b") <= 5


def test_endless_bursts_of_more_adapters_than_slots_serve_all() -> None:
    fleet = Fleet(max_loras=2, max_cpu_loras=3, turn_len=3)
    rng = np.random.default_rng(0)
    served = dict.fromkeys("abcd", 0)
    for _ in range(400):
        for reference, burst in ((A, 6), (B, 6), (C, 1), (D, 1)):
            for _ in range(burst if len(fleet.waiting) < 30 and rng.random() < 0.3 else 0):
                fleet.submit(reference)
        for name in fleet.step():
            served[name] += 1
        for sequence in tuple(fleet.running):
            if rng.random() < 0.5:
                fleet.end(sequence)
    assert min(served.values()) > 20, served
    for _ in range(400):  # everything that waits is served
        fleet.step()
        for sequence in tuple(fleet.running):
            fleet.end(sequence)
    assert fleet.waiting == []
    assert not any(each.parked for each in fleet.lora._adapters.values())


def test_preempted_sequence_starts_in_a_slot_that_yields() -> None:
    """The rows of its adapter would not end otherwise: beams wait for each other."""
    fleet = Fleet(max_loras=1, turn_len=1)
    first = fleet.submit(A)
    fleet.step()
    fleet.step()
    fleet.submit(B)
    fleet.step()
    resumed = fleet.submit(A)
    resumed.has_run = True
    fleet.step()
    assert resumed in fleet.running
    newer = fleet.submit(A)
    fleet.step()
    assert newer not in fleet.running
    fleet.end(first)
    fleet.end(resumed)
    assert fleet.step() == ["b"]


def test_unloaded_adapter_leaves_memory_when_its_sequences_have_ended() -> None:
    fleet = Fleet()
    fleet.lora.load(A, (b"gateway", 1))
    sequence = fleet.submit(A)
    fleet.step()
    fleet.step()
    fleet.lora.unload(A)
    fleet.step()
    assert list(fleet.loaded.values()) == [A.path]
    fleet.end(sequence)
    fleet.step()
    assert fleet.loaded == {}
    assert fleet.lora.take_replies() == [(b"gateway", LoraLoaded(1))]


def test_latest_version_of_a_name_is_registered() -> None:
    fleet = Fleet()
    caller = (b"gateway", 1)
    newer = LoraReference("a", "/adapters/a2", "2")
    fleet.lora.register(A, caller)
    fleet.step()
    fleet.lora.register(newer, caller)
    fleet.lora.register(newer, caller)
    fleet.lora.register(LoraReference("a", "/adapters/a1", "1"), caller)
    fleet.step()
    assert list(fleet.loaded.values()) == [newer.path]
    outcomes = ["", "another version of it was loaded meanwhile", "", ""]
    assert sorted(answer.error for _, answer in fleet.lora.take_replies()) == sorted(outcomes)
    fleet.lora.register(LoraReference("a", "", "3"), caller)
    fleet.step()
    assert fleet.loaded == {}
    assert fleet.lora.registry == (LoraReference("a", "", "3"),)


def test_adapter_dropped_before_its_order_was_sent_is_never_read() -> None:
    fleet = Fleet()
    fleet.lora.load(A)
    fleet.lora.unload(A)
    assert fleet.lora.take_orders()[0] == ()
    assert not fleet.lora.is_loading


def test_adapters_are_read_anew_after_the_ranks_failed() -> None:
    fleet = Fleet(max_loras=2)
    for reference in (A, B):
        fleet.submit(reference)
    fleet.step()
    fleet.step()
    running, fleet.running = fleet.running, []
    for sequence in running:
        sequence.row = None
        fleet.lora.on_release(sequence)
        fleet.waiting.append(sequence)
    fleet.lora.reset()
    fleet.loaded, fleet.slots = {}, {}
    assert fleet.step() == []
    assert fleet.step() == ["a", "b"]


def test_thousand_loads_and_unloads_leave_nothing() -> None:
    fleet = Fleet(max_loras=2, max_cpu_loras=3)
    for index in range(1000):
        reference = LoraReference(f"adapter{index % 7}", "/x", str(index))
        fleet.lora.load(reference, (b"gateway", index))
        sequence = fleet.submit(reference)
        while sequence not in fleet.running:
            fleet.step()
        fleet.end(sequence)
        fleet.lora.unload(reference)
    fleet.step()
    assert (fleet.loaded, fleet.lora.num_in_memory, fleet.lora.references) == ({}, 0, ())
    assert fleet.lora._adapters == {}
    assert len(fleet.lora.take_replies()) == 1000
