"""The thread pool of the C++ ops: correct with several callers, and idle or gone when unused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from quire.kernels.linear import linear, pack_int8
from quire.kernels.native.library import is_available

TASKS = Path("/proc/self/task")


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    if not is_available():
        pytest.skip("there is no C++ compiler")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


class Work:
    """A matrix product that all threads of a pool share, and its expected result."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        codes = torch.randint(-9, 10, (2000, 64), dtype=torch.int8)
        packed = pack_int8(codes, torch.ones(2000))
        assert packed is not None
        self.weight = packed
        self.x = torch.randint(-9, 10, (3, 64)).float()
        self.expected = self.x @ codes.float().t()

    def is_right(self) -> bool:
        return torch.equal(linear(self.x, self.weight), self.expected)


def test_concurrent_callers_get_correct_results() -> None:
    works = [Work(seed) for seed in range(3)]
    start = threading.Barrier(3)

    def call(work: Work) -> bool:
        torch.set_num_threads(3)
        start.wait(60)
        return all(work.is_right() for _ in range(300))

    with ThreadPoolExecutor(3) as callers:
        assert all(callers.map(call, works))


def test_calls_with_pauses_are_correct() -> None:
    """The pauses find workers spinning, falling asleep and asleep."""
    work = Work()
    for pause in [0.0, 5e-5, 1e-4, 1.5e-4, 3e-4, 2e-3] * 30:
        assert work.is_right()
        time.sleep(pause)


def test_number_of_threads_can_change() -> None:
    """The numbers divide the 32 tasks of the op, leave a remainder, and exceed them."""
    work = Work()
    for num_threads in (1, 4, 2, 3, 40, 1, 2):
        torch.set_num_threads(num_threads)
        assert work.is_right()


@pytest.mark.skipif(not TASKS.exists(), reason="needs /proc")
def test_workers_end_with_their_caller() -> None:
    run_alone(workers_end_with_their_caller)


def test_idle_workers_sleep() -> None:
    run_alone(idle_workers_sleep)


@pytest.mark.skipif(not TASKS.exists(), reason="needs /proc")
def test_workers_leave_the_processor_of_a_caller_that_moves() -> None:
    run_alone(workers_leave_the_processor_of_a_caller_that_moves)


def run_alone(function: Callable[[], None]) -> None:
    """Run a function in a new process, undisturbed by threads of other tests."""
    subprocess.run([sys.executable, __file__, function.__name__], check=True, timeout=240)


def workers_end_with_their_caller() -> None:
    work = Work()
    assert work.is_right()
    before = len(list(TASKS.iterdir()))
    num_threads = []

    def call() -> None:
        torch.set_num_threads(3)
        assert work.is_right()
        num_threads.append(len(list(TASKS.iterdir())))

    caller = threading.Thread(target=call)
    caller.start()
    caller.join(60)
    assert num_threads == [before + 3]
    deadline = time.monotonic() + 60
    while len(list(TASKS.iterdir())) > before and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel removes a joined thread with a delay
    assert len(list(TASKS.iterdir())) == before


def workers_leave_the_processor_of_a_caller_that_moves() -> None:
    """A worker that sleeps there would not get to run before the op has ended."""
    work, before, processors = Work(), {*os.listdir(TASKS)}, os.sched_getaffinity(0)
    assert work.is_right()
    workers = [int(task) for task in {*os.listdir(TASKS)} - before]
    assert workers
    for processor in processors:
        os.sched_setaffinity(0, {processor})
        assert work.is_right()
        others = processors - {processor} or processors
        assert [os.sched_getaffinity(worker) for worker in workers] == [others] * len(workers)


def idle_workers_sleep() -> None:
    assert Work().is_right()
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_process_gets_its_own_pool() -> None:
    work = Work()
    assert work.is_right()
    child = os.fork()
    if child == 0:
        # A handler of the test runner would wait for the interpreter; the default action ends a hanging child.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        os._exit(0 if work.is_right() else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert work.is_right()


if __name__ == "__main__":
    torch.set_num_threads(3)
    globals()[sys.argv[1]]()
