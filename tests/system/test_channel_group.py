"""ChannelWorkerGroup over real processes whose ranks reply, fail, hang or die on command."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import psutil
import pytest
import ray
from ray.exceptions import RayActorError

from quire.cluster.fleet.ray.local_cluster import LocalCluster
from quire.cluster.fleet.replica.channel_group import ChannelGroupFactory, ChannelWorkerGroup
from quire.cluster.fleet.replica.rank_processes import RankHandles
from quire.proto.errors import ConfigError, RankFailed
from quire.proto.replica_status import RankStatus
from quire.proto.step import StepFailure, StepPlan, StepResult
from quire.proto.transport.channel import ChannelAddress, StepReceiver
from quire.worker.rank.actor import RankProcess

pytestmark = pytest.mark.cluster

NUM_RANKS = 2
FAIL, HANG, STALE, LOSE_DEVICE = 1, 2, 3, 4  # actions
GATHER_TIMEOUT_S = DEADLINE_S = 60.0
START_S = 240.0  # as PROGRAM_TIMEOUT_S; the ranks import this file without the tests' own modules


def plan(step_id: int, rank: int = 0, action: int = 0) -> StepPlan:
    """Return a plan whose digest encodes the action of one rank."""
    return StepPlan(step_id, 1, digest=10 * rank + action)


class ScriptedRank:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._may_continue = threading.Event()
        self._has_left = threading.Event()

    def status(self) -> RankStatus:
        return RankStatus(self.rank, os.getpid(), f"host-{self.rank}", "cpu", "forward")

    def process(self) -> RankProcess:
        return RankProcess(os.getpid(), socket.gethostname())

    def run(self, address: ChannelAddress) -> None:
        self._may_continue.clear()
        self._has_left.clear()
        receiver = StepReceiver(address, self.rank)
        while (frame := receiver.receive()) is not None:
            step = StepPlan.decode(frame)
            action = step.digest % 10 if step.digest // 10 == self.rank else 0
            if action == HANG:
                self._may_continue.wait(DEADLINE_S)
            if action in (FAIL, LOSE_DEVICE):
                ends_rank = action == LOSE_DEVICE
                failure = StepFailure(
                    step.step_id, 1, self.rank, "sample", "ValueError: on command", ends_rank=ends_rank
                )
                receiver.reply(failure.encode())
                break
            if action == STALE:
                receiver.reply(StepResult(step.step_id, 0, self.rank, np.array([99], np.int32)).encode())
            receiver.reply(
                StepResult(step.step_id, 1, self.rank, np.array([step.step_id], np.int32)).encode()
            )
        receiver.close()
        self._has_left.set()

    def leave(self) -> None:
        """Wait until the step loop, whose group has been closed, has ended; it hangs no more."""
        self._may_continue.set()
        assert self._has_left.wait(DEADLINE_S), "the rank does not leave its group"


def stop_process(pid: int) -> None:
    """Stop a process and wait until it is stopped: until then it may still reply to a step."""
    process, deadline = psutil.Process(pid), time.monotonic() + DEADLINE_S
    process.send_signal(signal.SIGSTOP)
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


@dataclass
class Started:
    group: ChannelWorkerGroup
    pids: list[int]


class Ranks:
    """Processes of ranks that the tests share; one that a test has killed gets a successor.

    Attributes:
        workers: by rank.
    """

    def __init__(self) -> None:
        self._remote = ray.remote(ScriptedRank).options(max_concurrency=2, num_cpus=1)
        self.workers = [self._remote.remote(rank) for rank in range(NUM_RANKS)]

    def handles(self) -> RankHandles:
        statuses = tuple(ray.get([worker.status.remote() for worker in self.workers], timeout=START_S))
        processes = tuple(ray.get([worker.process.remote() for worker in self.workers], timeout=START_S))
        return RankHandles(tuple(self.workers), statuses, processes)

    def recover(self, pids: list[int]) -> None:
        """Wait until each rank has left its group, which has been closed."""
        for rank, pid in enumerate(pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            try:
                ray.get(self.workers[rank].leave.remote(), timeout=2 * DEADLINE_S)
            except RayActorError:
                self.workers[rank] = self._remote.remote(rank)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(NUM_RANKS) as opened:
        yield opened


@pytest.fixture(scope="module")
def ranks(cluster: LocalCluster) -> Ranks:
    return Ranks()


@pytest.fixture
def started(cluster: LocalCluster, ranks: Ranks) -> Iterator[Started]:
    handles = ranks.handles()
    factory = ChannelGroupFactory(ChannelAddress.in_directory(cluster.directory), handles, DEADLINE_S)
    group = factory()
    pids = [status.pid for status in handles.statuses]
    yield Started(group, pids)
    group.close()
    ranks.recover(pids)


def how_killed_ranks_end() -> str:
    from exit_status import KILLED  # here, as the ranks import this file without the tests' own modules

    return KILLED


def gather(group: ChannelWorkerGroup) -> StepResult:
    result = group.gather(GATHER_TIMEOUT_S)
    assert result is not None, "no result came"
    return result


def step_until_failure(group: ChannelWorkerGroup) -> None:
    """Run steps until a rank fails. These ranks do not wait for each other, so that may be some steps later."""
    deadline, step_id = time.monotonic() + DEADLINE_S, 2
    while time.monotonic() < deadline:
        group.gather(GATHER_TIMEOUT_S)
        time.sleep(0.01)
        group.broadcast(plan(step_id))
        step_id += 1


def check_until_failure(group: ChannelWorkerGroup) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        group.check()
        time.sleep(0.01)


def test_results_come_in_order_with_two_steps_in_flight(started: Started) -> None:
    group = started.group
    group.broadcast(plan(1))
    for step_id in range(2, 50):
        group.broadcast(plan(step_id))
        assert gather(group).step_id == step_id - 1
    assert gather(group).token_ids.tolist() == [49]
    group.check()


def test_results_of_another_epoch_are_dropped(started: Started) -> None:
    started.group.broadcast(plan(1, rank=0, action=STALE))
    assert gather(started.group).token_ids.tolist() == [1]


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_failing_rank_s_reason_and_stage_are_raised(started: Started, rank: int) -> None:
    started.group.broadcast(plan(1, rank, FAIL))
    with pytest.raises(RankFailed, match="on command") as caught:
        step_until_failure(started.group)
    assert (caught.value.rank, caught.value.stage) == (rank, "sample")
    assert caught.value.is_step_error
    assert started.group._life.failed_ranks == set()


def test_rank_that_lost_its_device_is_to_be_replaced(started: Started) -> None:
    started.group.broadcast(plan(1, 1, LOSE_DEVICE))
    with pytest.raises(RankFailed, match="on command") as caught:
        step_until_failure(started.group)
    assert not caught.value.is_step_error
    assert started.group._life.failed_ranks == {1}


def test_dead_rank_is_named_during_a_step(started: Started) -> None:
    started.group.broadcast(plan(1, rank=0, action=HANG))
    os.kill(started.pids[0], signal.SIGKILL)
    with pytest.raises(RankFailed, match=f"rank 0 failed at step 1: {how_killed_ranks_end()} on host-0"):
        started.group.gather(GATHER_TIMEOUT_S)


def test_dead_rank_is_named_while_idle(started: Started) -> None:
    os.kill(started.pids[1], signal.SIGKILL)
    with pytest.raises(RankFailed, match=f"rank 1 failed: {how_killed_ranks_end()}"):
        check_until_failure(started.group)


def test_hung_rank_is_named_with_its_stage_at_the_deadline(started: Started) -> None:
    started.group.broadcast(plan(1, rank=0, action=HANG))
    assert started.group.gather(0.1) is None
    examine_until_answered(started.group)
    with pytest.raises(RankFailed, match=r"rank 0 failed at step 1 in stage forward: no answer in 9.0 s"):
        examine_until_answered(started.group, 9.0)


def examine_until_answered(group: ChannelWorkerGroup, waited_s: float = 1.0) -> None:
    """Examine late ranks until they have answered."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        group.examine(waited_s, failed_s=5.0)
        examination = group._life._examination
        assert examination is not None
        if examination.is_answered and waited_s < 5.0:
            return
        assert time.monotonic() < deadline, "a rank does not answer"
        time.sleep(0.01)


def test_stopped_process_is_named_rather_than_a_waiting_rank(started: Started) -> None:
    stop_process(started.pids[1])
    started.group.broadcast(plan(1, rank=0, action=HANG))
    assert started.group.gather(0.1) is None
    with pytest.raises(RankFailed, match=r"rank 1 failed at step 1: .* its process on host-1 is stopped"):
        started.group.examine(0.6, failed_s=5.0)


def test_statuses_show_which_ranks_are_idle(started: Started) -> None:
    group = started.group
    assert [status.stage for status in group.statuses()] == ["idle", "idle"]
    group.broadcast(plan(1, rank=1, action=HANG))
    group.gather(GATHER_TIMEOUT_S)
    assert [status.stage for status in group.statuses()] == ["idle", "step"]
    assert [status.pid for status in group.statuses()] == started.pids


def test_second_cluster_in_one_process_is_refused(cluster: LocalCluster) -> None:
    with pytest.raises(ConfigError, match="connected to Ray already"):
        LocalCluster(1)
    assert cluster.directory.is_dir()
    assert cluster.directory.stat().st_mode & 0o077 == 0


def test_empty_step_round_trip(started: Started, record_property: Callable[[str, object], None]) -> None:
    """The bound on the fastest step only catches a polling sleep, however busy the machine is."""
    times: list[float] = []
    deadline = time.monotonic() + DEADLINE_S
    for step_id in itertools.count(1):
        if step_id > 500 and (min(times) < 0.005 or time.monotonic() > deadline):
            break
        begun = time.perf_counter()
        started.group.broadcast(plan(step_id))
        started.group.gather(GATHER_TIMEOUT_S)
        times.append(time.perf_counter() - begun)
    times.sort()
    record_property("median_us", round(times[len(times) // 2] * 1e6))
    assert times[0] < 0.005
