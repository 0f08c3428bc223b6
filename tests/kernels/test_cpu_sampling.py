"""Sampling on the CPU: the C++ ops against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels import sampling
from quire.kernels.gumbel import gumbel_noise, random_keys
from quire.kernels.logits import Biases, LogitsProcessors, Masks, Penalties, apply_logits_processors
from quire.kernels.native.library import is_available

LENGTHS = pytest.mark.parametrize("length", [1, 7, 16, 33, 4100])


@pytest.fixture(autouse=True)
def native() -> None:
    if not is_available():
        pytest.skip("there is no C++ compiler")


@LENGTHS
def test_greedy_sampling_breaks_ties_by_lowest_id(length: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(30, length + 3).round()[:, :length]
    values, token_ids = sampling.sample_greedy(logits, vocab_start=100)
    expected, _ = logits.max(dim=1)
    assert torch.equal(values, expected)
    assert (token_ids - 100).tolist() == [row.index(max(row)) for row in logits.tolist()]


def test_fully_masked_row_samples_token_0() -> None:
    values, token_ids = sampling.sample_greedy(torch.full((2, 40), -torch.inf))
    assert (values == -torch.inf).all()
    assert token_ids.tolist() == [0, 0]


def random_masks(num_rows: int, length: int) -> Masks:
    """Return masks of which each third row has none; with words that allow all tokens, none and some."""
    words = torch.randint(-(2**31), 2**31, (num_rows, -(-length // 32)), dtype=torch.int32)
    words[torch.rand(words.shape) < 0.3] = 0
    words[torch.rand(words.shape) < 0.3] = -1
    slots = torch.arange(num_rows).flip(0)
    slots[::3] = -1
    return Masks(slots, words)


def only(masks: Masks, length: int) -> LogitsProcessors:
    num_rows = len(masks.slots)
    biases = Biases(torch.zeros(num_rows + 1, dtype=torch.int32), masks.words[0, :0], torch.zeros(0))
    none = torch.zeros(0, length, dtype=torch.int16), masks.words[:0], torch.ones(num_rows, 3)
    return LogitsProcessors(length, biases, Penalties(torch.full((num_rows,), -1), *none), masks)


def masked(logits: Tensor, masks: Masks) -> Tensor:
    """Return the logits with -inf for forbidden tokens, token by token."""
    out = logits.clone()
    for row, slot in enumerate(masks.slots.tolist()):
        for column in range(logits.shape[1]):
            if slot >= 0 and not int(masks.words[slot, column // 32]) >> (column % 32) & 1:
                out[row, column] = -torch.inf
    return out


@pytest.mark.parametrize("selected", [None, [4, 1, 9, 18]])
@pytest.mark.parametrize("length", [1, 7, 16, 33, 300])
def test_masks_are_applied_as_logits_are_read(length: int, selected: list[int] | None) -> None:
    torch.manual_seed(length)
    logits, masks = torch.randn(20, length), random_masks(20, length)
    rows = None if selected is None else torch.tensor(selected)
    own = masked(logits, masks) if rows is None else masked(logits, masks)[rows]
    temperature = torch.linspace(0.3, 1.5, len(own))
    keys = random_keys(torch.arange(len(own)), torch.arange(len(own)))
    for mixed in (temperature, torch.where(torch.arange(len(own)) % 2 == 0, temperature, 0.0)):
        found = sampling.sample_full(logits, mixed, keys, 100, rows, only(masks, length))
        expected = sampling.sample_full(own, mixed, keys, 100)
        assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    found = sampling.sample_greedy(logits, 100, rows, only(masks, length))
    assert [each.tolist() for each in found] == [each.tolist() for each in sampling.sample_greedy(own, 100)]


def test_masked_logits_are_those_of_the_masks() -> None:
    torch.manual_seed(0)
    logits, masks = torch.randn(20, 75), random_masks(20, 70)
    expected = torch.cat((masked(logits[:, :70], masks), logits[:, 70:]), dim=1)
    assert torch.equal(apply_logits_processors(logits, only(masks, 70)), expected)


def test_many_rows_are_split_among_threads() -> None:
    torch.manual_seed(0)
    logits = torch.randn(400, 3000)
    _, token_ids = sampling.sample_greedy(logits)
    assert torch.equal(token_ids, logits.argmax(dim=1).int())


@LENGTHS
def test_sample_full_is_argmax_of_logits_plus_noise(length: int) -> None:
    torch.manual_seed(0)
    logits = 2 * torch.randn(20, length)
    logits[:, length // 2 + 1 :] = -torch.inf
    temperature = torch.linspace(0.3, 1.5, 20)
    keys = random_keys(torch.arange(20) - 9, 7 * torch.arange(20))
    scores, token_ids = sampling.sample_full(logits, temperature, keys, vocab_start=50_000)
    ids = torch.arange(50_000, 50_000 + length, dtype=torch.int32).unsqueeze(0)
    expected, index = (logits / temperature.unsqueeze(1) + gumbel_noise(keys, ids)).max(dim=1)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(token_ids, index.int() + 50_000)


def test_noise_is_accurate_in_both_tails() -> None:
    """The score of a single token with logit 0 is its noise; 200,000 keys reach far into both tails."""
    count = 200_000
    keys = random_keys(torch.arange(count), torch.zeros(count, dtype=torch.int64))
    noise, _ = sampling.sample_full(torch.zeros(count, 1), torch.ones(count), keys, vocab_start=3)
    expected = gumbel_noise(keys, torch.tensor([[3]], dtype=torch.int32)).squeeze(1)
    assert expected.max() > 11
    torch.testing.assert_close(noise, expected, atol=2e-5, rtol=1e-5)
