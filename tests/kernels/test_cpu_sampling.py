"""Sampling on the CPU: the C++ ops against PyTorch."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import sampling
from quire.kernels.gumbel import gumbel_noise, random_keys
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
