"""The fused all-reduce on one rank of a group, with prepared buffers and signals of the others."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from quire.kernels import all_reduce_norm as reference
from quire.kernels.all_reduce_norm import MAX_PROGRAMS, NUM_SIGNALS, Peers

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
EPS = 1e-5


@pytest.fixture(params=["reference", "kernel"])
def op(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "reference":
        return reference
    pytest.importorskip("triton")
    from quire.kernels.gpu import all_reduce_norm

    return all_reduce_norm


def expected_of(buffers: list[Tensor], residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new residual and its norm, in float64."""
    total = residual.double() + sum(part.double() for part in buffers)
    scale = (total.square().mean(dim=1, keepdim=True) + EPS).rsqrt()
    return total, total * scale * weight.double()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3, MAX_PROGRAMS + 2])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (2, 3)])
@pytest.mark.parametrize("two_shots", [False, True])
def test_rank_sums_the_buffers_of_all_ranks(
    op: ModuleType, device: str, rank: int, size: int, num_tokens: int, dtype: torch.dtype, two_shots: bool
) -> None:
    """The other ranks have signaled every barrier already, and summed their tokens of the first shot."""
    on = "cpu" if op is reference else device
    torch.manual_seed(0)
    inputs = [torch.randn(num_tokens, 40).to(on, dtype) for _ in range(size)]
    buffers = [torch.full((2, 40, 40), torch.nan).to(on, dtype) for _ in range(size)]
    total = torch.stack(inputs).sum(dim=0, dtype=torch.float32).to(dtype)
    num_programs = min(num_tokens, MAX_PROGRAMS)
    owners = [(row % num_programs + row // num_programs) % size for row in range(num_tokens)]
    signals = [torch.zeros(NUM_SIGNALS * size, dtype=torch.int32, device=on) for _ in range(size)]
    for other in range(size):
        if other != rank:
            buffers[other][0, :num_tokens] = inputs[other]
            own_rows = [row for row, owner in enumerate(owners) if owner == other]
            buffers[other][1, own_rows] = total[own_rows]
            signals[rank][other::size] = 1
    residual = torch.randn(num_tokens, 44).to(on, dtype)[:, :40]
    weight = torch.randn(40).to(on, dtype)
    expected_residual, expected = expected_of(inputs, residual, weight)
    peers = Peers(rank, buffers, signals)
    peers.two_shots_from = 1 if two_shots else 1000
    out = op.all_reduce_add_rms_norm(inputs[rank], residual, weight, EPS, peers)
    close(residual, expected_residual)
    close(out, expected)
    assert torch.equal(buffers[rank][0, :num_tokens], inputs[rank])
    if op is not reference:
        barriers = [0, 1, 2] if two_shots else [0, 2]
        for other in range(size):
            sent = signals[other].view(-1, 3, size)[:num_programs, barriers, rank]
            assert (sent == (other != rank)).all(), "this rank must signal every other"
        received = signals[rank].view(-1, 3, size)[:num_programs]
        assert not received[:, barriers].any(), "and reset its own signals"


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)
