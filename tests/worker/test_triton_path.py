"""A rank on the Triton kernels gives the same tokens as one on their PyTorch references."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from plain_processors import plain_processors
from quick_cases import slow_except
from triton_device import DEVICE

from quire.kernels import decode_splits, dispatch
from quire.kernels.latent_attention import latent_prefill_attention
from quire.proto.codec import NO_INTS
from quire.proto.model.mla import MlaSpec
from quire.proto.step import NewSequence, RowLogitsProcessors, RowSampling
from quire.worker.comm.communicator import SingleRank
from quire.worker.comm.shard import Shard
from quire.worker.sampling.sampler import SampledLogprobs, Sampler
from quire.worker.sampling.sampling_table import SamplingTable

SAMPLING = [
    RowSampling(temperature=0.0),
    RowSampling(temperature=0.8, seed=1),
    RowSampling(temperature=1.1, seed=2, top_k=20, top_p=0.9),
    RowSampling(
        seed=3, logits_processors=RowLogitsProcessors(2, 1.5, 0.5, 0.25, ((7, 2.0),), ((9,), (8, 9, 10)))
    ),
    RowSampling(
        seed=4,
        logits_processors=RowLogitsProcessors(
            3, 0.8, 0.0, -1.0, allowed_token_ids=(3, 7, 200, 350), stop_token_ids=(7,)
        ),
    ),
]
PROMPTS = [[5, 17, 99, 3, 42, 7, 11], [8], list(range(30, 50)), [8, 9], [3, 200, 9]]


@pytest.mark.parametrize("device", [DEVICE])
@pytest.mark.parametrize("kind", slow_except(["qwen3"], ["llama", "qwen3"]))
def test_triton_kernels_give_tokens_of_twins(
    make_model: Any, make_engine: Any, planned: Any, monkeypatch: pytest.MonkeyPatch, kind: str, device: str
) -> None:
    pytest.importorskip("triton")
    folder = make_model(kind, num_hidden_layers=2, num_key_value_heads=2)

    def generate(device: str) -> list[list[int]]:
        sequences = [
            planned(list(prompt), 4, sampling) for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True)
        ]
        engine = make_engine(folder, device=device)
        for runner in engine.runners:
            runner.memory.loaded.model.fused_decode = None  # native: decodes would reach no kernel on a CPU
        engine.generate(sequences, chunk_len=8)
        return [sequence.generated for sequence in sequences]

    expected = generate("cpu")
    monkeypatch.setattr(decode_splits, "NUM_EXTRA_ITEMS", 4)
    monkeypatch.setattr(dispatch, "has_kernels", lambda tensor: tensor.is_cuda or device == "cpu")
    assert generate(device) == expected


@pytest.mark.parametrize("device", [DEVICE])
@pytest.mark.parametrize(
    ("kind", "sizes", "is_expanded"),
    [
        ("deepseek_v3", {}, False),
        ("deepseek_v3", {}, True),
        ("deepseek_v32", {"index_topk": 5}, False),
        ("deepseek_v32", {"index_topk": 5}, True),
    ],
    ids=["absorbed", "expanded", "sparse", "masked"],
)
def test_triton_kernels_of_latents_give_tokens_of_twins(
    make_model: Any,
    make_engine: Any,
    planned: Any,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    kind: str,
    sizes: dict[str, int],
    is_expanded: bool,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(MlaSpec, "expansion_is_cheaper", lambda *lens: is_expanded)
    folder = make_model(kind, num_hidden_layers=1, **sizes)

    def generate(device: str) -> list[list[int]]:
        sequences = [planned(list(prompt), 3, SAMPLING[0]) for prompt in PROMPTS[:2]]
        make_engine(folder, device=device).generate(sequences, chunk_len=12)
        return [sequence.generated for sequence in sequences]

    expected = generate("cpu")
    monkeypatch.setattr(decode_splits, "NUM_EXTRA_ITEMS", 4)
    monkeypatch.setattr(dispatch, "has_kernels", lambda tensor: tensor.is_cuda or device == "cpu")
    assert generate(device) == expected


@pytest.mark.parametrize("device", [DEVICE])
def test_batch_invariant_chunks_of_latents_are_always_expanded(
    make_model: Any, make_engine: Any, planned: Any, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """The cheaper of the two ways depends on the lengths of all sequences of the batch."""
    pytest.importorskip("triton")
    folder = make_model("deepseek_v3", num_hidden_layers=1)
    expanded = list[int]()

    def prefill(q: torch.Tensor, *arguments: Any) -> torch.Tensor:
        expanded.append(len(q))
        return latent_prefill_attention(q, *arguments)

    monkeypatch.setattr("quire.worker.models.mixers.mla.latent_prefill_attention", prefill)

    def generate(device: str, **settings: Any) -> list[list[int]]:
        sequences = [planned(list(prompt), 3, SAMPLING[0]) for prompt in PROMPTS[:2]]
        make_engine(folder, device=device, **settings).generate(sequences, chunk_len=12)
        return [sequence.generated for sequence in sequences]

    expected = generate("cpu", batch_invariant=False)
    assert not expanded, "so few queries are absorbed"
    monkeypatch.setattr(decode_splits, "NUM_EXTRA_ITEMS", 4)
    monkeypatch.setattr(dispatch, "has_kernels", lambda tensor: tensor.is_cuda or device == "cpu")
    assert generate(device, batch_invariant=True) == expected
    assert sum(expanded) == sum(map(len, PROMPTS[:2]))


def sample_all(logits: torch.Tensor, device: str) -> tuple[list[int], SampledLogprobs]:
    """Sample one row of each kind in one step; row i reports i most likely tokens."""
    num_rows, vocab_len = logits.shape
    table, shard = SamplingTable(num_rows, vocab_len), Shard(0, 1, vocab_len)
    processors = plain_processors(shard, torch.zeros(num_rows, 32, dtype=torch.int32, device=device))
    for row, sampling in enumerate(SAMPLING):
        sampling = replace(sampling, logprobs=row)
        table.put(row, sampling)
        processors.put(NewSequence(row, row, np.array([8, 9, 7], np.int32), 0, NO_INTS, sampling))
    rows, lens = np.arange(num_rows, dtype=np.int32), np.full(num_rows, 3, dtype=np.int32)
    sampler = Sampler(shard, SingleRank(), torch.device(device))
    token_ids, logprobs = sampler.sample(logits.to(device), table, rows, lens, processors)
    assert logprobs is not None
    return token_ids.tolist(), logprobs


@pytest.mark.parametrize("device", [DEVICE])
def test_logprobs_are_of_unprocessed_logits(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Kernels and references apply the logits processors, but report log-probabilities without them."""
    pytest.importorskip("triton")
    logits = 2 * torch.randn(len(SAMPLING), 400, generator=torch.Generator().manual_seed(0))
    expected_ids, expected = sample_all(logits, "cpu")
    monkeypatch.setattr(dispatch, "has_kernels", lambda tensor: tensor.is_cuda or device == "cpu")
    given = logits.clone()
    token_ids, found = sample_all(logits, device)
    assert token_ids == expected_ids
    assert torch.equal(found.top_ids.cpu(), expected.top_ids)
    torch.testing.assert_close(found.top.cpu(), expected.top, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.chosen.cpu(), expected.chosen, atol=1e-5, rtol=1e-5)
    assert torch.equal(logits, given)
