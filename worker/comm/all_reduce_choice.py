"""Choice of the all-reduce for each number of tokens, by measurement on the ranks' own GPUs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...kernels.all_reduce_norm import FusedSum, Peers
from ...kernels.norm import add_rms_norm
from .communicator import Communicator

# Calls per measurement, after as many that warm up.
NUM_CALLS = 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SumTimes:
    """Seconds of an all-reduce, residual addition and norm: as a kernel in one or two shots, and by NCCL."""

    one_shot: float
    two_shots: float
    separate: float


def choose_all_reduce(peers: Peers, comm: Communicator) -> None:
    """Measure sums of 1, 2, 4, ... tokens and set the limits of `peers`, the same on all ranks, which call it."""
    times = {num_tokens: _measure(peers, comm, num_tokens) for num_tokens in _token_counts(peers.max_tokens)}
    peers.max_tokens, peers.two_shots_from = choose_limits(times)
    _log.info(
        "all-reduce: one shot below %d tokens, two shots from there, NCCL above %d",
        min(peers.two_shots_from, peers.max_tokens + 1),
        peers.max_tokens,
    )


def choose_max_tokens(
    fused: FusedSum, comm: Communicator, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Return the most tokens for which a library's sum is faster than NCCL, the same on all ranks, which call it."""
    times = dict[int, SumTimes]()
    for num_tokens in _token_counts(fused.max_tokens):
        x = torch.zeros(num_tokens, hidden_size, dtype=dtype, device=device)
        one, separate = _measure_ops(x, comm, [fused])
        times[num_tokens] = SumTimes(one, math.inf, separate)
    max_tokens, _ = choose_limits(times)
    _log.info("all-reduce: by a library up to %d tokens, NCCL above", max_tokens)
    return max_tokens


def choose_limits(times: Mapping[int, SumTimes]) -> tuple[int, int]:
    """Return the most tokens for which a kernel is faster than NCCL, and the tokens from which it takes two shots.

    Args:
        times: number of tokens, ascending |-> times. A limit holds for all smaller or all larger numbers.
    """
    max_tokens = 0
    for num_tokens, each in times.items():
        if min(each.one_shot, each.two_shots) >= each.separate:
            break
        max_tokens = num_tokens
    two_shots_from = max_tokens + 1
    for num_tokens, each in reversed(list(times.items())):
        if num_tokens <= max_tokens:
            if each.one_shot <= each.two_shots:
                break
            two_shots_from = num_tokens
    return max_tokens, two_shots_from


def _token_counts(max_tokens: int) -> list[int]:
    return [1 << exponent for exponent in range(max_tokens.bit_length())]


def _measure(peers: Peers, comm: Communicator, num_tokens: int) -> SumTimes:
    buffer = peers.buffers[peers.rank]
    x = torch.zeros(num_tokens, buffer.shape[2], dtype=buffer.dtype, device=buffer.device)
    shots = [_Shots(peers, num_tokens + 1), _Shots(peers, num_tokens)]
    return SumTimes(*_measure_ops(x, comm, shots))


class _Shots:
    """FusedSum that takes two shots from a number of tokens on."""

    def __init__(self, peers: Peers, two_shots_from: int) -> None:
        self.max_tokens = peers.max_tokens
        self._peers, self._two_shots_from = peers, two_shots_from

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        self._peers.two_shots_from = self._two_shots_from
        return self._peers.add_rms_norm(x, residual, weight, eps)


def _measure_ops(x: Tensor, comm: Communicator, sums: Sequence[FusedSum]) -> list[float]:
    """Return the seconds of each sum of x, and last of NCCL's with a norm of its own."""
    residual, weight = torch.zeros_like(x), torch.zeros_like(x[0])
    ops: list[Callable[[], object]] = [
        *(partial(each.add_rms_norm, x, residual, weight, 1e-6) for each in sums),
        lambda: add_rms_norm(comm.all_reduce(x), residual, weight, 1e-6),
    ]
    own = torch.tensor([_seconds(op) for op in ops], device=x.device)
    # The slowest rank counts; all get the same numbers.
    slowest: list[float] = comm.all_gather(own).amax(dim=0).tolist()
    return slowest


def _seconds(op: Callable[[], object]) -> float:
    """Return the seconds of a call, of NUM_CALLS in a row in a graph, as in steps.

    Launched one by one, small sums would cost their launches, whichever kernel they take.
    """
    op()  # compiles the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: as in CudaGraphs.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(NUM_CALLS):
            op()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / NUM_CALLS
