"""Biases, penalties and masks: reference and kernels against float64 definitions, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from logits_processors import to_device
from torch import Tensor
from triton_device import DEVICE

from quire.kernels.logits import Biases, LogitsProcessors, Masks, Penalties, apply_logits_processors

NUM_TOKENS = 101
# Four rows: slot of the penalties; repetition, frequency and presence; slot of the mask.
SLOTS, FACTORS = [3, -1, 4, 3], [(1.3, 0.2, 0.0), (9.0, 9.0, 9.0), (0.7, -0.5, 1.5), (1.0, 0.0, 0.4)]
MASK_SLOTS = [1, 0, -1, -1]
# (row, column, value): several of one token, adjacent or not; in the middle and at the ends of tiles.
ENTRIES = [(0, 0, -math.inf), (0, 40, 2.0), (0, 100, -1.5), (2, 31, 0.5), (2, 31, 0.25), (2, 32, 1.0)]
ENTRIES += [(2, 40, 3.0), (2, 40, -math.inf), (3, 5, -2.0), (3, 63, 1.0), (3, 64, 7.0), (3, 99, -0.125)]


@pytest.fixture(params=["reference", pytest.param("kernel", marks=DEVICE.marks)])
def adjust(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """Return apply_logits_processors: [N, C] logits and LogitsProcessors -> [N, C]."""
    if request.param == "reference":
        return apply_logits_processors
    pytest.importorskip("triton")
    from quire.kernels.gpu import topk_candidates
    from quire.kernels.gpu.topk_tokens import topk_tokens

    monkeypatch.setattr(topk_candidates, "GROUP_LEN", 4)
    monkeypatch.setattr(topk_candidates, "NUM_GROUPS", 8)
    monkeypatch.setattr(topk_candidates, "BLOCK_VOCAB", 32)

    def by_kernel(logits: Tensor, logits_processors: LogitsProcessors) -> Tensor:
        device = str(DEVICE.values[0])
        processors = to_device(logits_processors, device)
        found = topk_tokens(logits.to(device), logits.shape[1], logits_processors=processors)
        values, columns, _ = (tensor.cpu() for tensor in found)
        # Tokens of -inf are not among the candidates.
        rows, places = values.isfinite().nonzero(as_tuple=True)
        out = torch.full_like(logits, -torch.inf)
        out[rows, columns[rows, places].long()] = values[rows, places]
        return out

    return by_kernel


def pack_bits(bits: Tensor) -> Tensor:
    """Pack [N, V] bool -> [N, ceil(V / 32)] int32, bit by bit."""
    words = torch.zeros(len(bits), -(-bits.shape[1] // 32), dtype=torch.int64)
    for row, token_id in bits.nonzero().tolist():
        words[row, token_id // 32] |= 1 << (token_id % 32)
    return (words - ((words >> 31) << 32)).int()


def biases_of(entries: list[tuple[int, int, float]], num_rows: int) -> Biases:
    rows, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
    starts = [sum(row < n for row in rows) for n in range(num_rows + 1)]
    return Biases(
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(columns, dtype=torch.int32),
        torch.tensor(values, dtype=torch.float32),
    )


def none_of(num_rows: int) -> tuple[Biases, Penalties, Masks]:
    slots = torch.full((num_rows,), -1)
    counts, words = torch.zeros(0, NUM_TOKENS, dtype=torch.int16), torch.zeros(0, 4, dtype=torch.int32)
    penalties = Penalties(slots, counts, words, torch.ones(num_rows, 3))
    return biases_of([], num_rows), penalties, Masks(slots, words)


def penalized(
    logit: float, count: int, in_prompt: bool, repetition: float, frequency: float, presence: float
) -> float:
    if count or in_prompt:
        logit = logit / repetition if logit > 0 else logit * repetition
    return logit - frequency * count - presence * (count > 0)


@pytest.mark.parametrize("counted_in", [torch.int16, torch.int32], ids=str)
def test_all_processors_together(adjust: Callable[..., Tensor], counted_in: torch.dtype) -> None:
    """Rows with all processors and with none; the logits have two more columns than the vocabulary."""
    torch.manual_seed(0)
    counts = torch.randint(-3, 4, (5, NUM_TOKENS)).clamp_(min=0).to(counted_in)
    in_prompt, allowed = torch.rand(5, NUM_TOKENS) < 0.3, torch.rand(2, NUM_TOKENS) < 0.5
    logits = 3 * torch.randn(4, NUM_TOKENS + 2)
    logits[1:, 5] = -torch.inf
    expected = logits.double()
    for row, column, value in ENTRIES:
        expected[row, column] += value
    for n, (slot, factors, mask) in enumerate(zip(SLOTS, FACTORS, MASK_SLOTS, strict=True)):
        for column in range(NUM_TOKENS):
            if slot >= 0:
                count, was_there = int(counts[slot, column]), bool(in_prompt[slot, column])
                expected[n, column] = penalized(expected[n, column].item(), count, was_there, *factors)
            if mask >= 0 and not allowed[mask, column]:
                expected[n, column] = -math.inf
    penalties = Penalties(torch.tensor(SLOTS), counts, pack_bits(in_prompt), torch.tensor(FACTORS))
    masks = Masks(torch.tensor(MASK_SLOTS), pack_bits(allowed))
    given = logits.clone()
    result = adjust(logits, LogitsProcessors(NUM_TOKENS, biases_of(ENTRIES, 4), penalties, masks))
    torch.testing.assert_close(result.double(), expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(logits, given)


def test_no_processors_leave_logits_unchanged(adjust: Callable[..., Tensor]) -> None:
    logits = torch.randn(2, NUM_TOKENS)
    assert torch.equal(adjust(logits, LogitsProcessors(NUM_TOKENS, *none_of(2))), logits)


def test_repetition_penalty_matches_transformers(adjust: Callable[..., Tensor]) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    torch.manual_seed(0)
    token_ids = torch.randint(0, NUM_TOKENS, (2, 40))
    logits = torch.randn(2, NUM_TOKENS)
    expected = RepetitionPenaltyLogitsProcessor(1.2)(token_ids, logits.clone())
    prompt, output = token_ids[:, :25], token_ids[:, 25:]
    counts = torch.zeros(2, NUM_TOKENS, dtype=torch.int32)
    counts.scatter_add_(1, output, torch.ones_like(output, dtype=torch.int32))
    in_prompt = torch.zeros(2, NUM_TOKENS, dtype=torch.bool).scatter_(1, prompt, True)
    factors = torch.tensor([[1.2, 0.0, 0.0]]).repeat(2, 1)
    penalties = Penalties(torch.arange(2), counts, pack_bits(in_prompt), factors)
    biases, _, masks = none_of(2)
    result = adjust(logits, LogitsProcessors(NUM_TOKENS, biases, penalties, masks))
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-6)
