"""Small ops captured in a CUDA graph: a replay on new inputs gives the same bits as an eager call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cuda_graphs import capture, needs_gpu
from torch import Tensor

from quire.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from quire.kernels.gumbel import random_keys
from quire.kernels.logits import Biases, LogitsProcessors, Masks, Penalties
from quire.kernels.norm import add_rms_norm, add_rms_norm_float8, rms_norm
from quire.kernels.sampling import sample_full, sample_greedy, sample_top_k_top_p, topk_tokens

pytestmark = [pytest.mark.gpu, needs_gpu]

Inputs = list[Tensor]


def expect_replays(op: Callable[..., object], make_inputs: Callable[[], Inputs]) -> None:
    """Check that a replay on new inputs gives the same bits, in results and inputs, as an eager call."""
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


def test_sampling_with_logits_processors() -> None:
    """Rows, masks and settings change between capture and replay; some rows have none."""
    num_rows, vocab_len, num_biases = 6, 5000, 12

    def make_inputs() -> Inputs:
        between = torch.randint(0, num_biases, (num_rows - 1,)).sort().values
        return [
            2 * torch.randn(num_rows, vocab_len),
            torch.randperm(num_rows),
            torch.cat((torch.tensor([0]), between, torch.tensor([num_biases]))).int(),
            torch.randint(0, vocab_len, (num_biases,)).sort().values.int(),
            torch.randn(num_biases),
            torch.randint(-1, num_rows, (num_rows,)),
            torch.randint(0, 3, (num_rows, vocab_len), dtype=torch.int16),
            torch.randint(-(2**31), 2**31, (num_rows, -(-vocab_len // 32)), dtype=torch.int32),
            torch.rand(num_rows, 3) + 0.5,
            torch.rand(num_rows) + 0.3,
            torch.randint(1, vocab_len + 9, (num_rows,)),
            torch.rand(num_rows, dtype=torch.float64) + 0.3,
            0.1 * torch.rand(num_rows),
            torch.randint(0, 999, (num_rows,)),
        ]

    def sample(
        logits: Tensor,
        rows: Tensor,
        starts: Tensor,
        columns: Tensor,
        amounts: Tensor,
        slots: Tensor,
        counts: Tensor,
        words: Tensor,
        factors: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
    ) -> list[Tensor]:
        keys = random_keys(seeds, seeds)
        logits_processors = LogitsProcessors(
            vocab_len,
            Biases(starts, columns, amounts),
            Penalties(slots, counts, words, factors),
            Masks(slots, words),
        )
        return [
            sample_top_k_top_p(logits, temperature, top_k, top_p, min_p, keys, rows, logits_processors),
            *sample_full(logits, temperature, keys, 0, rows, logits_processors),
            *sample_greedy(logits, 0, rows, logits_processors),
            *topk_tokens(logits, 20, temperature, rows, logits_processors),
        ]

    torch.manual_seed(0)
    expect_replays(sample, make_inputs)
