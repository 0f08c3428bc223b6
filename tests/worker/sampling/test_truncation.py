"""Sampling with temperature, top_k, top_p and min_p follows the distribution of transformers' processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from chi_square import assert_chi_square
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quire.proto.step import RowSampling
from quire.worker.comm.communicator import SingleRank
from quire.worker.comm.shard import Shard
from quire.worker.sampling.sampler import Sampler
from quire.worker.sampling.sampling_table import SamplingTable

NUM_SAMPLES = 2000
SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1.4, "top_k": 9},
    {"top_p": 0.8},
    {"temperature": 0.9, "top_p": 0.35},
    {"min_p": 0.08},
    {"temperature": 1.3, "top_k": 25, "top_p": 0.9, "min_p": 0.03},
    {"top_k": 1},
    {"top_p": 1e-9},
    {"min_p": 1.0},
]


def expected_probabilities(logits: Tensor, settings: dict[str, Any]) -> Tensor:
    """Return the distribution after transformers' processors in the order of its `generate`, [V] float64."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(float(settings.get("temperature", 1.0)))])
    for name, make in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        if name in settings:
            processors.append(make(settings[name]))
    no_tokens = torch.zeros(1, 0, dtype=torch.int64)
    left: Tensor = processors(no_tokens, logits.double().unsqueeze(0))[0]
    return left.softmax(dim=-1)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab_size", [60, 700])
def test_samples_follow_distribution_of_transformers(vocab_size: int, settings: dict[str, Any]) -> None:
    logits = 2 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    table = SamplingTable(NUM_SAMPLES, vocab_size)
    for row in range(NUM_SAMPLES):
        table.put(row, RowSampling(**settings, seed=row))
    sampler = Sampler(Shard(0, 1, vocab_size), SingleRank(), torch.device("cpu"))
    rows = np.arange(NUM_SAMPLES, dtype=np.int32)
    sampled, _ = sampler.sample(logits.repeat(NUM_SAMPLES, 1), table, rows, np.full_like(rows, 3))
    counts = torch.bincount(sampled.long(), minlength=vocab_size).double()
    expected = expected_probabilities(logits, settings)
    assert counts[expected == 0].sum() == 0
    assert_chi_square(counts, expected * NUM_SAMPLES)
