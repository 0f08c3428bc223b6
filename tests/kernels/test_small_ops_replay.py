"""Captured in a CUDA graph, ops compute on what lies in their tensors at each replay, as eager calls do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cuda_graphs import capture, needs_gpu
from torch import Tensor

from quire.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from quire.kernels.gumbel import random_keys
from quire.kernels.logits import apply_bias, apply_bitmask, apply_penalties
from quire.kernels.norm import add_rms_norm, add_rms_norm_float8, rms_norm
from quire.kernels.sampling import draw_from_all, draw_from_kept

pytestmark = [pytest.mark.gpu, needs_gpu]

Inputs = list[Tensor]


def expect_replays(op: Callable[..., object], make_inputs: Callable[[], Inputs]) -> None:
    """A replay on new inputs leaves, in results and inputs, the bits that an eager call does."""
    static = [tensor.cuda() for tensor in make_inputs()]
    graph, out = capture(lambda: op(*static))
    for _ in range(2):
        new = [tensor.cuda() for tensor in make_inputs()]
        for tensor, value in zip(static, new, strict=True):
            tensor.copy_(value)
        graph.replay()
        expected = op(*new)
        assert all(map(same_bits, tensors_of(out), tensors_of(expected)))
        assert all(map(same_bits, static, new))


def tensors_of(result: object) -> list[Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, Tensor) else list(result)  # type: ignore[call-overload]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def halves(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("op", [rms_norm, add_rms_norm, add_rms_norm_float8], ids=lambda op: op.__name__)
def test_norms(op: Callable[..., object]) -> None:
    if op is add_rms_norm_float8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8")
    num_inputs = 1 if op is rms_norm else 2
    expect_replays(
        lambda *inputs: op(*inputs, 1e-5),
        lambda: [*(halves(5, 96) for _ in range(num_inputs)), halves(96)],
    )


@pytest.mark.parametrize("op", [silu_and_mul, gelu_tanh_and_mul], ids=lambda op: op.__name__)
def test_gates(op: Callable[..., object]) -> None:
    expect_replays(op, lambda: [halves(5, 192)])


def test_the_sampler_from_penalties_to_draws() -> None:
    """Captured on other rows, masks and settings than are replayed, padding among them."""
    num_rows, vocab_len = 6, 5000

    def make_inputs() -> Inputs:
        rows = torch.randperm(num_rows)
        return [
            2 * torch.randn(num_rows, vocab_len),
            torch.randint(0, 3, (num_rows, vocab_len), dtype=torch.int16),
            torch.randint(-(2**31), 2**31, (num_rows, -(-vocab_len // 32)), dtype=torch.int32),
            rows,
            torch.rand(3, num_rows) + 0.5,
            torch.stack((rows, torch.randint(-1, vocab_len, (num_rows,)))),
            rows.where(torch.rand(num_rows) < 0.5, -1),
            torch.rand(num_rows) + 0.3,
            torch.randint(1, vocab_len + 9, (num_rows,)),
            torch.rand(num_rows, dtype=torch.float64) + 0.3,
            0.1 * torch.rand(num_rows),
            random_keys(torch.randint(0, 999, (num_rows,)), torch.arange(num_rows)),
        ]

    def sample(
        logits: Tensor,
        counts: Tensor,
        words: Tensor,
        rows: Tensor,
        penalties: Tensor,
        biased: Tensor,
        masked: Tensor,
        temperature: Tensor,
        *cuts_and_keys: Tensor,
    ) -> list[Tensor]:
        apply_penalties(logits, counts, words, rows, *penalties.unbind())
        apply_bias(logits, *biased.unbind(), temperature)
        apply_bitmask(logits, words, masked)
        drawn = draw_from_kept(logits, temperature, *cuts_and_keys)
        return [drawn, *draw_from_all(logits, temperature, cuts_and_keys[-1])]

    torch.manual_seed(0)
    expect_replays(sample, make_inputs)
