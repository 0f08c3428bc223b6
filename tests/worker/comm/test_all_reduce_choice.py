"""Limits of the fused all-reduce, from measured times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.kernels.all_reduce_norm import NUM_SIGNALS, Peers
from quire.worker.comm import all_reduce_choice
from quire.worker.comm.all_reduce_choice import SumTimes, choose_all_reduce, choose_limits
from quire.worker.comm.communicator import SingleRank


@pytest.mark.parametrize(
    ("times", "max_tokens", "two_shots_from"),
    [
        ([(1, 2, 3), (1, 2, 3), (2, 2, 3)], 4, 5),
        ([(1, 2, 3), (3, 2, 4), (5, 2, 4)], 4, 2),
        ([(1, 2, 3), (9, 9, 4), (1, 1, 4)], 1, 2),  # NCCL is faster from 2 tokens on
        ([(2, 1, 3), (1, 2, 3), (2, 1, 3)], 4, 4),
        ([(4, 4, 3), (4, 4, 3), (4, 4, 3)], 0, 1),
    ],
)
def test_limits_hold_for_all_smaller_or_larger_sums(
    times: list[tuple[float, float, float]], max_tokens: int, two_shots_from: int
) -> None:
    by_tokens = {1 << index: SumTimes(*each) for index, each in enumerate(times)}
    assert choose_limits(by_tokens) == (max_tokens, two_shots_from)


def test_sums_are_timed_as_replays_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of launches, which steps do not pay, must not choose the kernel."""
    log: list[str] = []

    class Event:
        def __init__(self, **_: Any) -> None: ...

        def record(self) -> None:
            log.append("event")

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Event) -> float:
            return 40.0

    @contextmanager
    def capture(graph: Any, **_: Any) -> Iterator[None]:
        log.append("begin")
        yield
        log.append("end")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: log.append("replay")))
    seconds = all_reduce_choice._seconds(lambda: log.append("call"))
    assert seconds == pytest.approx(0.040 / all_reduce_choice.NUM_CALLS)
    recorded = ["begin", *["call"] * all_reduce_choice.NUM_CALLS, "end"]
    assert log == ["call", *recorded, "replay", "event", "replay", "event"]


def test_ranks_choose_by_the_slowest_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The own GPU is fast in one shot, the other one in two."""

    class Comm(SingleRank):
        def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
            return torch.stack((tensor, torch.tensor([3.0, 1.0, 4.0])))

    def seconds(op: Any) -> float:
        op()
        return 1.0

    monkeypatch.setattr(all_reduce_choice, "_seconds", seconds)
    signals = torch.zeros(NUM_SIGNALS, dtype=torch.int32)
    peers = Peers(0, [torch.zeros(2, 5, 8)], [signals])
    choose_all_reduce(peers, Comm())
    assert (peers.max_tokens, peers.two_shots_from) == (4, 1)
