"""The threads that share the C++ ops' work: right with several callers, and gone or asleep when nobody calls."""

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
    """A product that every thread of a team has a part of, and what it must give."""

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


def test_callers_do_not_disturb_each_other() -> None:
    works = [Work(seed) for seed in range(3)]
    start = threading.Barrier(3)

    def call(work: Work) -> bool:
        torch.set_num_threads(3)
        start.wait(60)
        return all(work.is_right() for _ in range(300))

    with ThreadPoolExecutor(3) as callers:
        assert all(callers.map(call, works))


def test_rounds_with_pauses_between_them() -> None:
    """Helpers are met awake, on their way to sleep, and asleep."""
    work = Work()
    for pause in [0.0, 5e-5, 1e-4, 1.5e-4, 3e-4, 2e-3] * 30:
        assert work.is_right()
        time.sleep(pause)


def test_another_number_of_threads() -> None:
    work = Work()
    for num_threads in (1, 4, 2, 3, 1, 2):
        torch.set_num_threads(num_threads)
        assert work.is_right()


@pytest.mark.skipif(not TASKS.exists(), reason="needs /proc")
def test_helpers_end_with_their_caller() -> None:
    run_alone(helpers_end_with_their_caller)


def test_idle_helpers_sleep() -> None:
    run_alone(idle_helpers_sleep)


def run_alone(function: Callable[[], None]) -> None:
    """In a process of its own, where no other test's threads come, go and take time."""
    subprocess.run([sys.executable, __file__, function.__name__], check=True, timeout=240)


def helpers_end_with_their_caller() -> None:
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
    deadline = time.monotonic() + 30
    while len(list(TASKS.iterdir())) > before and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel takes a moment to forget a thread that was joined
    assert len(list(TASKS.iterdir())) == before


def idle_helpers_sleep() -> None:
    assert Work().is_right()
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_a_team_of_its_own() -> None:
    work = Work()
    assert work.is_right()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if work.is_right() else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert work.is_right()


if __name__ == "__main__":
    torch.set_num_threads(3)
    globals()[sys.argv[1]]()
