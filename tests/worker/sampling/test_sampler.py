"""Sampler: its distribution and truncation, and independence of ranks and batches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from chi_square import assert_chi_square
from kernel_references import find_reference
from torch import Tensor

from quire.kernels import dispatch
from quire.proto.step import RowSampling
from quire.worker.comm.communicator import SingleRank
from quire.worker.comm.shard import Shard
from quire.worker.sampling.sampler import NUM_CANDIDATES, SampledLogprobs, Sampler
from quire.worker.sampling.sampling_table import SamplingTable

CPU = torch.device("cpu")


def sample(
    logits: Tensor, settings: list[RowSampling], lens: list[int]
) -> tuple[Tensor, SampledLogprobs | None]:
    """Sample one token per row on one rank; logits are [N, V]."""
    table, rows, lengths = table_of(logits, settings, lens)
    sampler = Sampler(Shard(0, 1, logits.shape[1]), SingleRank(), CPU)
    return sampler.sample(logits.clone(), table, rows, lengths)


def sample_on_ranks(
    thread_group: Any, size: int, logits: Tensor, settings: list[RowSampling], lens: list[int]
) -> list[tuple[Tensor, SampledLogprobs | None]]:
    """Return each rank's output, with the vocabulary sharded over `size` ranks."""
    group = thread_group(size)
    table, rows, lengths = table_of(logits, settings, lens)

    def on_rank(rank: int) -> tuple[Tensor, SampledLogprobs | None]:
        shard = Shard(rank, size, logits.shape[1])
        local = torch.full((logits.shape[0], shard.padded_len), -torch.inf)
        local[:, : len(shard)] = logits[:, shard.start : shard.end]
        return Sampler(shard, group.communicator(rank), CPU).sample(local, table, rows, lengths)

    return group.run(on_rank, range(size))


def table_of(logits: Tensor, settings: list[RowSampling], lens: list[int]) -> tuple[SamplingTable, Any, Any]:
    table = SamplingTable(len(settings), logits.shape[1])
    for row, sampling in enumerate(settings):
        table.put(row, sampling)
    return table, np.arange(len(settings), dtype=np.int32), np.array(lens, dtype=np.int32)


def reference_probabilities(logits: Tensor, sampling: RowSampling) -> Tensor:
    """Return the exact distribution after temperature and truncation, by sorting: [V] float64."""
    probabilities = (logits.double() / sampling.temperature).softmax(dim=-1)
    order = probabilities.argsort(descending=True, stable=True)
    kept = order[: sampling.top_k] if sampling.top_k else order
    if sampling.top_p < 1:
        of_kept = probabilities[kept] / probabilities[kept].sum()
        kept = kept[of_kept.cumsum(0) - of_kept < sampling.top_p]
    kept = kept[probabilities[kept] >= sampling.min_p * probabilities.max()]
    out = torch.zeros_like(probabilities)
    out[kept] = probabilities[kept]
    return out / out.sum()


def random_logits(num_rows: int, vocab_size: int, seed: int, spread: float = 2.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


TRUNCATIONS = {
    "none": RowSampling(temperature=1.3),
    "top_k": RowSampling(temperature=0.8, top_k=7),
    "top_k of one": RowSampling(top_k=1),
    "top_p": RowSampling(temperature=1.1, top_p=0.7),
    "min_p": RowSampling(min_p=0.1),
    "all": RowSampling(temperature=1.5, top_k=30, top_p=0.9, min_p=0.02),
    "tiny top_p": RowSampling(top_p=1e-6),
}


@pytest.mark.parametrize("seed_of", ["position", "seed"])
@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_tokens_follow_exact_distribution(truncation: str, seed_of: str) -> None:
    """Chi-square over 20,000 samples at successive positions of one seed, and at one position of successive seeds."""
    num_samples, sampling = 20_000, TRUNCATIONS[truncation]
    logits = random_logits(1, 50, seed=11)
    expected = reference_probabilities(logits[0], sampling)
    by_position = seed_of == "position"
    settings = [with_seed(sampling, 99 if by_position else draw) for draw in range(num_samples)]
    lens = list(range(1, num_samples + 1)) if by_position else [17] * num_samples
    tokens, _ = sample(logits.expand(num_samples, -1), settings, lens)
    counts = torch.bincount(tokens.long(), minlength=50).double()
    assert counts[expected == 0].sum() == 0
    assert_chi_square(counts, expected * num_samples)


def test_nucleus_larger_than_candidates_is_sampled_exactly() -> None:
    num_samples, sampling = 10_000, RowSampling(temperature=1.2, top_p=0.97)
    logits = random_logits(1, 400, seed=12, spread=1.0)
    expected = reference_probabilities(logits[0], sampling)
    assert (expected > 0).sum() > NUM_CANDIDATES
    settings = [with_seed(sampling, draw) for draw in range(num_samples)]
    tokens, _ = sample(logits.expand(num_samples, -1), settings, [5] * num_samples)
    counts = torch.bincount(tokens.long(), minlength=400).double()
    assert counts[expected == 0].sum() == 0
    assert_chi_square(counts, expected * num_samples)


def test_noise_of_adjacent_positions_is_independent() -> None:
    """Pairs of samples at successive positions follow the product distribution."""
    num_samples = 40_000
    settings = [RowSampling(seed=5)] * num_samples
    tokens, _ = sample(torch.zeros(1, 8).expand(num_samples, -1), settings, list(range(num_samples)))
    pairs = tokens[::2] * 8 + tokens[1::2]
    counts = torch.bincount(pairs.long(), minlength=64).double()
    assert_chi_square(counts, torch.full((64,), num_samples / 2 / 64, dtype=torch.float64))


def with_seed(sampling: RowSampling, seed: int) -> RowSampling:
    return RowSampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed)


@pytest.mark.parametrize("vocab_size", [37, 1000])
@pytest.mark.parametrize("spread", [0.3, 4.0])
def test_truncation_keeps_exactly_reference_tokens(vocab_size: int, spread: float) -> None:
    """Nuclei within the candidates, and larger than them."""
    logits = random_logits(1, vocab_size, seed=3, spread=spread)
    for sampling in (
        RowSampling(top_k=5),
        RowSampling(top_k=NUM_CANDIDATES + 40),
        RowSampling(top_p=0.5),
        RowSampling(top_p=0.999),
        RowSampling(min_p=0.3),
        RowSampling(min_p=1e-4),
        RowSampling(top_k=NUM_CANDIDATES + 9, top_p=0.4),
        RowSampling(temperature=3.0, top_k=20, top_p=0.6, min_p=0.05),
    ):
        possible = reference_probabilities(logits[0], sampling) > 0
        num_samples = 1000
        settings = [with_seed(sampling, seed) for seed in range(num_samples)]
        tokens, _ = sample(logits.expand(num_samples, -1), settings, [3] * num_samples)
        sampled = torch.bincount(tokens.long(), minlength=vocab_size) > 0
        assert not (sampled & ~possible).any(), sampling
        if possible.sum() <= 20:
            assert (sampled == possible).all(), sampling


def mixed_settings(num_rows: int) -> list[RowSampling]:
    kinds = [RowSampling(temperature=0.0), *TRUNCATIONS.values(), RowSampling(top_p=0.99, temperature=5.0)]
    return [with_seed(kinds[row % len(kinds)], row * 1_000_003) for row in range(num_rows)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("vocab_size", [64, 1001])
def test_tokens_do_not_depend_on_number_of_ranks(size: int, vocab_size: int, thread_group: Any) -> None:
    logits, settings = random_logits(36, vocab_size, seed=5), mixed_settings(36)
    lens = list(range(36))
    alone, _ = sample(logits, settings, lens)
    for tokens, _ in sample_on_ranks(thread_group, size, logits, settings, lens):
        assert tokens.tolist() == alone.tolist()


def test_tokens_do_not_depend_on_batch() -> None:
    logits, settings = random_logits(18, 300, seed=6), mixed_settings(18)
    together, _ = sample(logits, settings, list(range(18)))
    for row in range(18):
        alone, _ = sample(logits[row : row + 1], [settings[row]], [row])
        assert alone.item() == together[row].item()


def test_lowest_id_wins_tie_on_any_number_of_ranks(thread_group: Any) -> None:
    logits = torch.zeros(2, 40)
    logits[0, [13, 25, 39]] = 1.0
    settings = [RowSampling(temperature=0.0), RowSampling(top_k=3)]
    for size in (1, 2, 4):
        for tokens, _ in sample_on_ranks(thread_group, size, logits, settings, [1, 1]):
            assert tokens[0] == 13
            assert tokens[1] in (0, 1, 2)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_logprobs_are_of_whole_vocabulary(size: int, thread_group: Any) -> None:
    logits = random_logits(4, 50, seed=8)
    settings = [
        RowSampling(temperature=0.0, logprobs=0),
        RowSampling(temperature=0.0),
        RowSampling(temperature=2.0, top_k=3, seed=1, logprobs=5),
        RowSampling(temperature=0.7, seed=2, logprobs=2),
    ]
    expected = logits.log_softmax(dim=-1)
    for tokens, logprobs in sample_on_ranks(thread_group, size, logits, settings, [4] * 4):
        assert logprobs is not None
        assert logprobs.index.tolist() == [0, 2, 3]
        rows = torch.tensor([0, 2, 3])
        chosen = expected[rows, tokens[rows].long()]
        torch.testing.assert_close(logprobs.chosen, chosen)
        num_greater = (expected[rows] > chosen.unsqueeze(1)).sum(dim=1)
        assert logprobs.ranks.tolist() == (1 + num_greater).tolist()
        top, top_ids = expected[rows].topk(5)
        assert logprobs.top_ids.tolist() == top_ids.tolist()
        torch.testing.assert_close(logprobs.top, top)


def test_no_logprobs_by_default() -> None:
    _, logprobs = sample(random_logits(2, 30, seed=1), [RowSampling(), RowSampling(temperature=0.0)], [1, 1])
    assert logprobs is None


def test_zero_logprobs_have_no_top() -> None:
    _, logprobs = sample(random_logits(1, 30, seed=1), [RowSampling(logprobs=0)], [1])
    assert logprobs is not None
    assert logprobs.top.shape == (1, 0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_non_finite_logits_give_valid_tokens(poison: float) -> None:
    """An overflow in one request must not stop the engine."""
    logits = torch.full((9, 300), poison)
    tokens, _ = sample(logits, mixed_settings(9), [1] * 9)
    assert ((tokens >= 0) & (tokens < 300)).all()


def test_negative_and_large_seeds_differ() -> None:
    logits = torch.zeros(1, 1000).expand(4, -1)
    settings = [RowSampling(seed=seed) for seed in (-1, (1 << 63) - 1, -(1 << 63), 0)]
    tokens, _ = sample(logits, settings, [1] * 4)
    assert len(set(tokens.tolist())) > 1


def test_rows_with_a_small_top_k_gather_no_logits_on_gpus(
    thread_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their candidates suffice whatever the logits, so no host waits to learn whether they do."""
    monkeypatch.setattr(dispatch, "has_kernels", lambda tensor: True)
    monkeypatch.setattr(dispatch, "_load", lambda module: _References(module))
    gathered: list[int] = []
    gather = Sampler._gather_logits

    def count(self: Sampler, logits: Tensor, processors: Any, rows: Tensor) -> Tensor:
        gathered.append(len(rows))
        return gather(self, logits, processors, rows)

    monkeypatch.setattr(Sampler, "_gather_logits", count)
    logits = random_logits(6, 1001, seed=21)
    settings = [
        RowSampling(temperature=1.3, seed=1),
        RowSampling(temperature=0.8, top_k=64, seed=2),
        RowSampling(temperature=1.5, top_k=40, top_p=0.9, min_p=0.02, seed=3),
        RowSampling(temperature=1.1, top_p=0.7, seed=4),
        RowSampling(top_k=65, seed=5),
        RowSampling(temperature=0.0),
    ]
    expected, _ = sample(logits, settings, [3] * 6)
    for tokens, _ in sample_on_ranks(thread_group, 2, logits, settings, [3] * 6):
        assert torch.equal(tokens, expected)
    assert gathered == [2, 2]


class _References:
    """The references in place of a module of kernels."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return find_reference(self._module, name)
