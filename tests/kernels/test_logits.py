"""Penalties, biases and masks: twins and kernels against their definitions, token by token in float64."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from quire.kernels import logits as twins

NUM_TOKENS = 101


@pytest.fixture(params=["twin", "kernel"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "twin":
        return twins
    pytest.importorskip("triton")
    from quire.kernels.gpu import logits

    return logits


@pytest.fixture
def on(ops: ModuleType, device: str) -> str:
    """Where the op's tensors are."""
    return "cpu" if ops is twins else device


def pack_bits(allowed: Tensor) -> Tensor:
    """[N, V] bool -> [N, ceil(V / 32)] int32, bit by bit."""
    words = torch.zeros(len(allowed), -(-allowed.shape[1] // 32), dtype=torch.int64)
    for row, token_id in allowed.nonzero().tolist():
        words[row, token_id // 32] |= 1 << (token_id % 32)
    return words.int() if not words.max() >> 31 else (words - ((words >> 31) << 32)).int()


def penalised(
    logit: float, count: int, in_prompt: bool, repetition: float, frequency: float, presence: float
) -> float:
    if count or in_prompt:
        logit = logit / repetition if logit > 0 else logit * repetition
    return logit - frequency * count - presence * (count > 0)


@pytest.mark.parametrize("counted_in", [torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize(("vocab_start", "num_columns"), [(0, NUM_TOKENS), (34, 34), (68, 34)])
def test_penalties(
    ops: ModuleType, on: str, vocab_start: int, num_columns: int, counted_in: torch.dtype
) -> None:
    """The last part of three has a column more than there are tokens."""
    torch.manual_seed(0)
    counts = torch.randint(-3, 4, (5, NUM_TOKENS)).clamp_(min=0).to(counted_in)
    in_prompt = torch.rand(5, NUM_TOKENS) < 0.3
    row_index = torch.tensor([3, 0, 4, 3])
    repetition = torch.tensor([1.3, 1.0, 0.7, 1.0])
    frequency, presence = torch.tensor([0.2, 0.0, -0.5, 0.0]), torch.tensor([0.0, 0.0, 1.5, 0.4])
    logits = 3 * torch.randn(4, num_columns)
    logits[1:, 5] = -torch.inf
    expected = logits.double()
    for n, row in enumerate(row_index.tolist()):
        for column in range(min(num_columns, NUM_TOKENS - vocab_start)):
            token_id = vocab_start + column
            expected[n, column] = penalised(
                expected[n, column].item(), int(counts[row, token_id]), bool(in_prompt[row, token_id]),
                repetition[n].item(), frequency[n].item(), presence[n].item(),
            )  # fmt: skip
    tables = (counts, pack_bits(in_prompt), row_index, repetition, frequency, presence)
    result = logits.to(on)
    ops.apply_penalties(result, *(table.to(on) for table in tables), vocab_start)
    torch.testing.assert_close(result.cpu().double(), expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(result[1].cpu(), logits[1])


def test_repetition_penalty_is_that_of_transformers(ops: ModuleType, on: str) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    torch.manual_seed(0)
    token_ids = torch.randint(0, NUM_TOKENS, (2, 40))
    logits = torch.randn(2, NUM_TOKENS)
    expected = RepetitionPenaltyLogitsProcessor(1.2)(token_ids, logits.clone())
    prompt, output = token_ids[:, :25], token_ids[:, 25:]
    counts = torch.zeros(2, NUM_TOKENS, dtype=torch.int32)
    counts.scatter_add_(1, output, torch.ones_like(output, dtype=torch.int32))
    in_prompt = torch.zeros(2, NUM_TOKENS, dtype=torch.bool).scatter_(1, prompt, True)
    result, none = logits.to(on), torch.zeros(2, device=on)
    ops.apply_penalties(
        result, counts.to(on), pack_bits(in_prompt).to(on), torch.arange(2, device=on), none + 1.2, none, none
    )
    torch.testing.assert_close(result.cpu(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("vocab_start", "num_columns"), [(0, NUM_TOKENS), (34, 34)])
def test_biases_add_up_and_padding_does_nothing(
    ops: ModuleType, on: str, vocab_start: int, num_columns: int
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, num_columns)
    logits[0, 0] = -torch.inf
    entries = [(0, 40, 2.0), (2, 40, -torch.inf), (2, 67, 1.0), (1, 34, 0.5), (1, 34, 0.25), (1, 100, 9.0)]
    entries += [(0, -1, 5.0), (0, 34, 1.0), (2, 3, -1.5), (2, 40, 1.0), (0, 68, -2.0)]
    expected = logits.double()
    for row, token_id, value in entries:
        if 0 <= token_id - vocab_start < num_columns:
            expected[row, token_id - vocab_start] += value
    rows, token_ids, values = zip(*entries, strict=True)
    result = logits.to(on)
    ops.apply_bias(
        result,
        torch.tensor(rows, device=on),
        torch.tensor(token_ids, device=on),
        torch.tensor(values, device=on),
        vocab_start,
    )
    torch.testing.assert_close(result.cpu().double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("vocab_start", "num_columns"), [(0, NUM_TOKENS), (34, 34), (68, 34)])
def test_bitmask(ops: ModuleType, on: str, vocab_start: int, num_columns: int) -> None:
    """Rows that are not named keep every token, whatever their bits."""
    torch.manual_seed(0)
    allowed = torch.rand(4, NUM_TOKENS) < 0.5
    logits = torch.randn(4, num_columns)
    result = logits.to(on)
    ops.apply_bitmask(result, pack_bits(allowed).to(on), torch.tensor([3, -1, 1], device=on), vocab_start)
    for row in range(4):
        for column in range(min(num_columns, NUM_TOKENS - vocab_start)):
            is_forbidden = row in (1, 3) and not allowed[row, vocab_start + column]
            assert result[row, column] == (-math.inf if is_forbidden else logits[row, column])
