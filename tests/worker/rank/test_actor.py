"""WorkerActor and InProcessGroup make the rank's GPU current on every thread that calls them."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import fake_accelerator
import pytest
import ray
import torch
from fakes import small_config
from tape import TapeBackend

from quire.cluster.offline import in_process
from quire.proto.config import EngineConfig, SwapRates
from quire.proto.errors import RankFailed
from quire.proto.model.parallel_split import ParallelSplit
from quire.proto.step import StepPlan, StepResult, decode_reply
from quire.proto.transport.channel import ChannelAddress
from quire.proto.transport.network import CurveKeys
from quire.worker.comm import replica_groups, torch_distributed
from quire.worker.comm.pipeline import Pipeline
from quire.worker.comm.replica_groups import ReplicaGroups
from quire.worker.comm.torch_distributed import TorchDistributed
from quire.worker.graphs.graphs import Recording
from quire.worker.rank import actor
from quire.worker.rank.device import compute_device, on_device
from quire.worker.rank.step_executor import LaunchedStep

ORDINAL = 5


class Runner:
    """A ModelRunner that records each call with its thread and the thread's current device."""

    calls: ClassVar[list[tuple[str, int, int]]] = []
    devices: ClassVar[list[torch.device | None]] = []
    stage = "idle"

    def __init__(self, *_: Any, device: torch.device | None = None, **__: Any) -> None:
        self.device = device
        self.devices.append(device)
        self._record("init")

    def num_blocks_that_fit(self) -> int:
        self._record("profile")
        return 7

    def allocate_cache(self, num_blocks: int) -> SwapRates:
        self._record("allocate")
        return SwapRates()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self._record("launch")
        return LaunchedStep(StepResult(plan.step_id, plan.epoch, 0))

    def close(self) -> None:
        self._record("close")

    def drop_graphs(self) -> None: ...

    def serve_blocks(self, endpoint: str, keys: CurveKeys | None) -> None: ...

    def end_serving(self) -> None: ...

    def reset(self, *, has_new_ranks: bool) -> None:
        self._record("reset")

    def _record(self, name: str) -> None:
        self.calls.append((name, threading.get_ident(), fake_accelerator.current_device_index()))


class Group:
    """A group of two ranks, of which this is the first."""

    rank, size = 0, 2
    is_closed = False

    def close(self, drop_recordings: Callable[[], object] = lambda: None) -> None:
        drop_recordings()
        self.is_closed = True


class Receiver:
    """A channel with one plan."""

    def __init__(self, *_: object) -> None:
        self._frames = [StepPlan(1, 1, digest=0).encode()]

    def receive(self) -> bytes | None:
        return self._frames.pop() if self._frames else None

    def reply(self, frame: bytes) -> None: ...

    def close(self) -> None: ...


def on_new_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    fake_accelerator.install(monkeypatch)
    # Ray has assigned the last of the GPUs that the process sees.
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ["7"]})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,7")
    Runner.calls.clear()
    Runner.devices.clear()
    config = small_config()
    return replace(config, parallel=replace(config.parallel, device="cuda"))


def test_worker_actor_makes_its_gpu_current_on_every_thread(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray calls the constructor and the methods on different threads."""
    monkeypatch.setattr(actor, "StepReceiver", Receiver)
    rank = on_new_thread(lambda: actor.WorkerActor(config, 0, Runner))
    report = on_new_thread(lambda: rank.load(None))
    assert [name for name, _, _ in Runner.calls] == ["init"]  # no collective before every rank has loaded
    assert on_new_thread(rank.profile) == 7
    on_new_thread(lambda: rank.allocate(7))
    on_new_thread(lambda: rank.run(ChannelAddress("", "")))
    assert report.status.device == f"cuda:{ORDINAL}"
    assert Runner.devices == [torch.device("cuda", ORDINAL)]
    names = [name for name, _, _ in Runner.calls]
    assert names == ["init", "profile", "allocate", "launch"]  # the weights stay
    assert {index for _, _, index in Runner.calls} == {ORDINAL}
    assert fake_accelerator.current_device_index() == 0


def test_standby_becomes_the_rank_of_its_new_configuration(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    standby: Any = actor.WorkerActor(config, None, Runner)
    assert standby.assigned_rank() is None
    assert standby.process().pid == os.getpid()
    standby.take_place(replace(config, model=replace(config.model, path="elsewhere")), 1)
    assert standby.assigned_rank() == standby.load(None).status.rank == 1
    assert standby._config.model.path == "elsewhere"
    with pytest.raises(AssertionError, match="is rank 1 already"):
        standby.take_place(config, 0)


def test_rank_passes_on_what_it_logged_at_its_start(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Logging(Runner):
        def _record(self, name: str) -> None:
            logging.getLogger("quire.of_a_test").info("%s", name)

    rank = actor.WorkerActor(config, 0, Logging)
    rank.load(None)
    rank.profile()
    rank.allocate(7)
    messages = [record.message for record in rank.take_start_log()]
    assert messages == ["init", "profile", "allocate"]
    assert rank.take_start_log() == ()


def test_run_ends_though_the_device_does_not(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels of a collective that wait for a dead rank never end, and leaving the group waits for them."""
    monkeypatch.setattr(actor, "StepReceiver", Receiver)
    monkeypatch.setattr(actor, "LEAVE_TIMEOUT_S", 0.05)
    released = threading.Event()
    group = Group()
    monkeypatch.setattr(group, "close", lambda _: released.wait(60))
    rank = actor.WorkerActor(config, 0, Runner)
    monkeypatch.setattr(replica_groups, "join_group", lambda *_: group)
    rank.load(("127.0.0.1", 1))
    with caplog.at_level(logging.WARNING):
        rank.run(ChannelAddress("", ""))
    released.set()
    assert rank.status().stage == "ended"
    assert "rank 0: the group was not left in 0.05 s" in caplog.text


class RecordedGroup:
    """A group of NCCL whose abort waits for the graphs that its collectives are recorded in."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.num_graphs = self.num_at_abort = 0
        self.is_aborted = False

    def record(self, graph: Any) -> None:
        """Note a graph; it counts until nothing refers to it."""
        self.num_graphs += 1
        weakref.finalize(graph, self._forget)

    def abort(self) -> None:
        with self._condition:
            self.num_at_abort = self.num_graphs
            self.is_aborted = self._condition.wait_for(lambda: not self.num_graphs, 60)

    def _forget(self) -> None:
        with self._condition:
            self.num_graphs -= 1
            self._condition.notify_all()


@pytest.mark.parametrize("ends_by", ["close", "failed step", "leave"])
def test_group_is_aborted_while_its_graphs_are_dropped(
    make_model: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch, ends_by: str
) -> None:
    """Survivors of a failure would otherwise wait for the end of the deadline, and be replaced."""
    monkeypatch.setattr(torch_distributed, "CLOSE_TIMEOUT_S", 60)
    monkeypatch.setattr(actor, "LEAVE_TIMEOUT_S", 60)
    monkeypatch.setattr(actor, "StepReceiver", Receiver)
    backend, group = TapeBackend(), RecordedGroup()
    record = backend.record

    def record_in_group(compute: Any) -> Recording:
        recording = record(compute)
        group.record(recording.replay)
        return recording

    backend.record = record_in_group  # type: ignore[method-assign]
    engine = make_engine(make_model("llama"), 1, graph_backend=backend)
    (runner,) = engine.runners
    comm = TorchDistributed(0, 1, torch.device("cuda", 0), None, group)
    runner._pipeline = Pipeline.of_one_stage(comm)
    rank: Any = actor.WorkerActor(engine.config, 0)
    monkeypatch.setattr(replica_groups, "join_group", lambda *_: comm)
    groups = ReplicaGroups(ParallelSplit.of(engine.config.parallel), 0, torch.device("cpu"), 60.0)
    groups.join("127.0.0.1", 1)
    rank._runner, rank._groups = runner, groups
    if ends_by == "close":
        runner.close()
    elif ends_by == "failed step":
        rank.run(ChannelAddress("", ""))  # the digest of its plan is not that of the rows
    else:
        rank._device = torch.device("cuda", 0)
        fake_accelerator.install(monkeypatch)
        rank.leave()
    assert group.num_at_abort > 0
    assert group.is_aborted


def test_rank_rejoins_a_new_group_with_its_weights_in_place(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "StepReceiver", Receiver)
    groups = [Group(), Group()]
    joined = iter(groups)
    rank = actor.WorkerActor(config, 0, Runner)
    monkeypatch.setattr(replica_groups, "join_group", lambda *_: next(joined))
    on_new_thread(lambda: rank.load(("127.0.0.1", 1)))
    on_new_thread(lambda: rank.run(ChannelAddress("", "")))
    assert groups[0].is_closed
    assert rank.status().stage == "ended"
    on_new_thread(lambda: rank.rejoin(("127.0.0.1", 2), has_new_ranks=True))
    assert rank.status().stage == "idle"
    assert (groups[0].is_closed, groups[1].is_closed) == (True, False)
    assert [name for name, _, _ in Runner.calls] == ["init", "launch", "reset"]
    assert {index for _, _, index in Runner.calls} == {ORDINAL}


def test_in_process_group_uses_gpu_of_the_thread_that_made_it(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLM executes its steps on a thread of its own."""
    monkeypatch.setattr(in_process, "ModelRunner", Runner)
    with on_device(torch.device("cuda", ORDINAL)):
        _, group = in_process.load_in_process(config)
    on_new_thread(lambda: group.broadcast(StepPlan(1, 1, digest=0)))
    on_new_thread(group.close)
    assert group.statuses()[0].device == f"cuda:{ORDINAL}"
    assert Runner.devices == [torch.device("cuda", ORDINAL)]
    assert {index for _, _, index in Runner.calls} == {ORDINAL}


def test_collectives_join_on_the_actors_gpu(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = actor.WorkerActor(config, 0, Runner)
    joined: list[tuple[torch.device, int]] = []

    def join(
        rank: int, size: int, host: str, port: int, device: torch.device, timeout_s: float, name: str
    ) -> Group:
        joined.append((device, fake_accelerator.current_device_index()))
        return Group()

    monkeypatch.setattr(replica_groups, "join_group", join)
    on_new_thread(lambda: rank.load(("127.0.0.1", 1)))
    assert joined == [(torch.device("cuda", ORDINAL), ORDINAL)]


def test_on_device_does_nothing_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.accelerator, "device_index")
    with on_device(compute_device("cpu")):
        pass


class _SlowStep:
    """A launched step whose tokens are computed only after the next step has been launched."""

    def __init__(self, step_id: int, may_end: threading.Event) -> None:
        self.launched = StepResult(step_id, 1, 0)
        self._may_end = may_end

    def result(self) -> StepResult:
        assert self._may_end.wait(60), "the next step was not launched"
        return self.launched


def test_worker_actor_launches_a_step_while_the_device_computes_another(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies: list[int] = []
    second_launched = threading.Event()

    class TwoPlans(Receiver):
        def __init__(self, *_: object) -> None:
            self._frames = [StepPlan(step_id, 1, digest=0).encode() for step_id in (2, 1)]

        def reply(self, frame: bytes) -> None:
            replies.append(decode_reply(frame).step_id)

    def launch(self: Runner, plan: StepPlan) -> _SlowStep:
        if plan.step_id == 2:
            second_launched.set()
        return _SlowStep(plan.step_id, second_launched)

    monkeypatch.setattr(actor, "StepReceiver", TwoPlans)
    monkeypatch.setattr(Runner, "launch", launch)
    rank = actor.WorkerActor(config, 0, Runner)
    rank.load(None)
    rank.run(ChannelAddress("", ""))
    assert replies == [1, 2]


@pytest.mark.parametrize(
    ("problem", "ends_rank"),
    [
        ("AcceleratorError: CUDA error: an illegal memory access was encountered", True),
        ("OutOfMemoryError: CUDA out of memory", False),
    ],
)
def test_worker_actor_reports_a_failed_kernel_and_ends(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, problem: str, ends_rank: bool
) -> None:
    """After some errors the process can use its GPU no more: another one must take its place."""
    replies: list[Any] = []

    class Broken:
        launched = StepResult(1, 1, 0)

        def result(self) -> StepResult:
            raise RankFailed(0, problem, 1, "device")

    monkeypatch.setattr(actor, "StepReceiver", Receiver)
    monkeypatch.setattr(Receiver, "reply", lambda self, frame: replies.append(decode_reply(frame)))
    monkeypatch.setattr(Runner, "launch", lambda self, plan: Broken())
    rank = actor.WorkerActor(config, 0, Runner)
    rank.load(None)
    rank.run(ChannelAddress("", ""))
    (failure,) = replies
    assert (failure.stage, failure.reason, failure.ends_rank) == ("device", problem, ends_rank)
    if ends_rank:
        with pytest.raises(RuntimeError, match="rank 0 must be replaced: AcceleratorError"):
            rank.leave()
    else:
        rank.leave()
