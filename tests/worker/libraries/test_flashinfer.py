"""Attention by FlashInfer, through a package with its recorded signatures that computes by definition."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_flashinfer import FakeFlashInfer
from kernel_references import find_reference
from paged import Paged
from stand_in_gpu import current_gpu, installed
from torch import Tensor
from variants import VARIANTS

from quire.kernels.attention_variant import PLAIN, AttentionVariant
from quire.kernels.latent_attention import ChunkBounds
from quire.proto.step import RowSampling
from quire.worker.attention import OWN_ATTENTION, AttentionInputs, LayerCache, paged_attention
from quire.worker.libraries import flashinfer, model_fit
from quire.worker.libraries import installed as libraries
from quire.worker.libraries.flashinfer import FlashInfer

BLOCK_SIZE, HEAD_DIM = 4, 64
GREEDY = RowSampling(temperature=0.0)
WINDOW = AttentionVariant(window=5)
CPU = torch.device("cpu")
SINKS = torch.linspace(-2.0, 3.0, 12)
PROMPTS = [[5, 17, 99, 3, 42, 7, 11], [8], list(range(30, 42)), [8, 9], [3, 200, 9]]


def make_inputs(paged: Paged, num_decodes: int, chunk_lens: list[int]) -> AttentionInputs:
    """Return the inputs of a step whose sequences are in `paged`."""
    lens = paged.lens.tolist()
    starts = torch.tensor([0, *np.cumsum(chunk_lens)], dtype=torch.int32)
    return AttentionInputs(
        num_decodes,
        torch.zeros(num_decodes + sum(chunk_lens), dtype=torch.int64),
        paged.tables,
        starts,
        paged.lens,
        chunks=ChunkBounds(chunk_lens, lens[num_decodes:]),
        decode_lens=paged.lens[:num_decodes].numpy(),
    )


@pytest.mark.parametrize("num_heads", [2, 12], ids=["group-1", "group-6"])
@pytest.mark.parametrize(
    "variant",
    [
        PLAIN,
        WINDOW,
        AttentionVariant(soft_cap=3.0),
        AttentionVariant(window=9, soft_cap=2.0),
        AttentionVariant(sinks=SINKS),
        AttentionVariant(window=5, sinks=SINKS),
    ],
    ids=["plain", "window", "soft-cap", "window-soft-cap", "sinks", "window-sinks"],
)
def test_step_equals_that_of_own_kernels(variant: AttentionVariant, num_heads: int) -> None:
    if variant.sinks is not None:
        variant = replace(variant, sinks=variant.sinks[:num_heads])
    fake = FakeFlashInfer()
    backend = FlashInfer(fake, CPU)
    paged = Paged([19, 1, 4, 7, 30, 12], BLOCK_SIZE, 2, HEAD_DIM, torch.bfloat16)
    inputs = make_inputs(paged, 3, [2, 17, 12])
    if variant.window:
        lens = paged.lens - torch.tensor([1, 1, 1, 2, 17, 12]) + 1 - variant.window
        paged.poison_before([max(0, first // BLOCK_SIZE * BLOCK_SIZE) for first in lens.tolist()])
    q, cache = torch.randn(34, num_heads, HEAD_DIM).bfloat16(), LayerCache(paged.cache)
    own = paged_attention(q, cache, inputs, 0.2, variant)
    for _ in range(2):  # the second layer has the plan of the first one
        found = paged_attention(q, cache, backend.begin_step(inputs), 0.2, variant)
        torch.testing.assert_close(found, own, atol=2e-2, rtol=2e-2)
    assert (fake.num_plans, fake.num_runs) == (4, 4)
    assert (backend.num_calls, backend.unsupported) == (4, set())


def test_layers_of_a_kind_share_a_plan() -> None:
    fake = FakeFlashInfer()
    backend = FlashInfer(fake, CPU)
    paged = Paged([9, 3], BLOCK_SIZE, 2, HEAD_DIM, torch.bfloat16)
    inputs = backend.begin_step(make_inputs(paged, 2, []))
    q, cache = torch.randn(2, 2, HEAD_DIM).bfloat16(), LayerCache(paged.cache)
    for variant in (PLAIN, WINDOW, PLAIN, WINDOW):
        paged_attention(q, cache, inputs, 0.2, variant)
    assert (fake.num_plans, fake.num_runs) == (2, 4)


@pytest.mark.parametrize(
    ("reason", "feature"),
    [
        ("alibi", "linear biases (ALiBi)"),
        ("sinks", "attention sinks and a soft cap"),
        ("quantized", "a quantized KV cache"),
        ("float32", "dtype float32"),
        ("heads", "heads of 80 numbers"),
    ],
)
def test_others_are_computed_by_own_kernels(reason: str, feature: str) -> None:
    fake = FakeFlashInfer()
    backend = FlashInfer(fake, CPU)
    dtype = torch.float32 if reason == "float32" else torch.bfloat16
    stored, head_dim = torch.int8 if reason == "quantized" else None, 80 if reason == "heads" else HEAD_DIM
    paged = Paged([9, 6], BLOCK_SIZE, 2, head_dim, dtype, "cpu", stored)
    variant = PLAIN
    if reason == "alibi":
        variant = AttentionVariant(alibi_slopes=VARIANTS["all"](4, "cpu").alibi_slopes)
    if reason == "sinks":
        variant = AttentionVariant(soft_cap=3.0, sinks=torch.randn(4))
    inputs = make_inputs(paged, 1, [5])
    q, cache = torch.randn(6, 4, head_dim).to(dtype), LayerCache(paged.cache, paged.scales)
    found = paged_attention(q, cache, backend.begin_step(inputs), 0.3, variant)
    assert torch.equal(found, paged_attention(q, cache, inputs, 0.3, variant))
    assert (fake.num_runs, backend.num_calls, backend.unsupported) == (0, 0, {feature})
    assert backend.describe() == f"Triton kernels, since FlashInfer does not support {feature}"


def test_sinks_of_a_second_head_size_are_computed_by_own_kernels() -> None:
    """Its compiled kernels with sinks are named without the size of heads."""
    fake = FakeFlashInfer()
    backend = FlashInfer(fake, CPU)
    variant = AttentionVariant(sinks=torch.randn(4))
    for head_dim in (64, 128, 64):
        paged = Paged([9, 3], BLOCK_SIZE, 2, head_dim, torch.bfloat16)
        q, cache = torch.randn(2, 4, head_dim).bfloat16(), LayerCache(paged.cache)
        paged_attention(q, cache, backend.begin_step(make_inputs(paged, 2, [])), 0.2, variant)
    assert (fake.num_runs, backend.unsupported) == (2, {"attention sinks with heads of 128 numbers"})


LATENT_LENS = [19, 1, 4, 7]


def make_latents(dtype: torch.dtype, gap: int) -> tuple[LayerCache, AttentionInputs]:
    """Return a cache of latents of which queries attend to the first 576 numbers of a row, and a step of decodes."""
    paged = Paged(LATENT_LENS, BLOCK_SIZE, 1, 576 + gap, dtype)
    cache = LayerCache(paged.cache[:, :1].contiguous()[..., :576])
    return cache, make_inputs(paged, len(LATENT_LENS), [])


@pytest.mark.parametrize("gap", [0, 128], ids=["dense", "beside-an-indexers-keys"])
def test_decodes_of_latents_equal_those_of_own_kernels(gap: int) -> None:
    fake = FakeFlashInfer()
    backend = FlashInfer(fake, CPU)
    cache, inputs = make_latents(torch.bfloat16, gap)
    q = torch.randn(len(LATENT_LENS), 6, 576).bfloat16()
    own = OWN_ATTENTION.decode_latents(q, cache, inputs, 0.05, 512)
    planned = backend.begin_step(inputs)
    for _ in range(2):
        found = planned.library.decode_latents(q, cache, planned, 0.05, 512)
        torch.testing.assert_close(found, own, atol=2e-2, rtol=2e-2)
    assert (fake.num_plans, fake.num_runs) == (1, 2)


@pytest.mark.parametrize(
    ("value_dim", "capability", "feature"),
    [
        (448, (9, 0), "latents of 448 and 128 numbers"),
        (512, (10, 0), "latents on this GPU"),
    ],
)
def test_other_latents_are_computed_by_own_kernels(
    monkeypatch: pytest.MonkeyPatch, value_dim: int, capability: tuple[int, int], feature: str
) -> None:
    fake = FakeFlashInfer()
    with installed(monkeypatch, stand_in=find_reference):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        backend = FlashInfer(fake, torch.device("cuda", 0))
    cache, _ = make_latents(torch.bfloat16, 0)
    q = torch.randn(len(LATENT_LENS), 6, 576).bfloat16()
    assert not backend.supports_latents(q, cache, value_dim)
    assert backend.unsupported == {feature}


@pytest.mark.parametrize(
    ("kind", "model", "capability", "problem"),
    [
        ("deepseek_v3", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, (9, 0), ""),
        ("deepseek_v3", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, (10, 0), "latents or states"),
        ("deepseek_v3", {}, (9, 0), "latents or states"),
        ("gpt_oss", {"head_dim": 64}, (9, 0), ""),
    ],
)
def test_fit_of_a_model(
    make_model: Any,
    engine_config: Any,
    kind: str,
    model: dict[str, int],
    capability: tuple[int, int],
    problem: str,
) -> None:
    config = engine_config(make_model(kind, **model), dtype="bfloat16")
    found = FlashInfer.find_problem(config, capability)
    assert problem in found
    assert bool(found) == bool(problem)


def test_steps_of_unknown_lengths_are_computed_by_own_kernels() -> None:
    backend = FlashInfer(FakeFlashInfer(), CPU)
    paged = Paged([9], BLOCK_SIZE, 2, HEAD_DIM, torch.bfloat16)
    inputs = AttentionInputs(1, torch.zeros(1).long(), paged.tables, torch.zeros(1).int(), paged.lens)
    assert backend.begin_step(inputs).library is OWN_ATTENTION


@pytest.mark.parametrize("num_heads", [2, 12], ids=["group-1", "group-6"])
def test_caches_with_fixed_scales_equal_those_of_own_kernels(num_heads: int) -> None:
    fake = FakeFlashInfer()
    backend = FlashInfer(fake, CPU)
    paged = Paged([19, 1, 4, 7, 30, 12], BLOCK_SIZE, 2, HEAD_DIM, torch.bfloat16, "cpu", torch.float8_e4m3fn)
    assert paged.scales is not None
    paged.scales[:, 0], paged.scales[:, 1] = 0.01, 0.03
    inputs = make_inputs(paged, 3, [2, 17, 12])
    q = torch.randn(34, num_heads, HEAD_DIM).bfloat16()
    cache = LayerCache(paged.cache, paged.scales, fixed_scales=(0.01, 0.03))
    found = paged_attention(q, cache, backend.begin_step(inputs), 0.2)
    torch.testing.assert_close(found, paged_attention(q, cache, inputs, 0.2), atol=2e-2, rtol=2e-2)
    assert (fake.num_runs, backend.unsupported) == (2, set())
    # Its kernels with sinks take no scales.
    paged_attention(q, cache, backend.begin_step(inputs), 0.2, AttentionVariant(sinks=torch.zeros(num_heads)))
    assert (fake.num_runs, backend.unsupported) == (2, {"a quantized KV cache"})


def on_stand_in(function: Callable[..., Tensor], *args: Any) -> Any:
    return current_gpu().launch_kernel("flashinfer", function, args, {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
def test_plan_waits_until_the_device_has_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are launched ahead, and a plan overwrites the pinned memory that the one before is copied from."""
    paged = Paged([9, 3], BLOCK_SIZE, 2, HEAD_DIM, torch.bfloat16)
    host = make_inputs(paged, 2, [])
    with installed(monkeypatch, stand_in=find_reference) as gpu:
        device = torch.device("cuda", 0)
        backend = FlashInfer(FakeFlashInfer(on_stand_in), device)
        inputs = replace(host, block_tables=paged.tables.to(device), seq_lens=paged.lens.to(device))
        q, cache = torch.randn(2, 2, HEAD_DIM).bfloat16().to(device), LayerCache(paged.cache.to(device))
        gpu.num_syncs.clear()
        for _ in range(3):
            paged_attention(q, cache, backend.begin_step(inputs), 0.2)
        assert dict(gpu.num_syncs) == {"event.synchronize": 3}
        torch.cuda.synchronize()  # the stand-in GPU finds sources that changed too early
        del backend, inputs, q, cache


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cuda_graphs": False},
        {
            "kind": "gemma2",
            "block_size": 4,
            "model": {
                "num_hidden_layers": 2,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        },
        {"kv_dtype": "fp8_per_tensor"},
        {"kind": "deepseek_v3", "model": {"num_key_value_heads": 4}},
        {
            "kind": "gpt_oss",
            "block_size": 4,
            "model": {
                "num_hidden_layers": 2,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        },
    ],
    ids=["graphs", "launches", "windows", "fixed-scales", "latents", "sinks"],
)
def test_worker_gives_tokens_of_cpu(
    make_model: Any, make_engine: Any, planned: Any, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    """Load, profile, record, prefill and decode on the stand-in GPU, whose rules forbid waits and torn copies."""
    settings = {"kind": "llama", "max_num_batched_tokens": 16, "max_num_seqs": 4, **settings}
    kind = settings.pop("kind")
    folder = make_model(
        kind, **{"num_hidden_layers": 1, "num_key_value_heads": 2, **settings.pop("model", {})}
    )

    def generate(**more: Any) -> list[list[int]]:
        sequences = [planned(list(prompt), 5, GREEDY) for prompt in PROMPTS]
        engine = make_engine(folder, **{**settings, **more})
        engine.generate(sequences, chunk_len=8)
        engine.close()
        return [sequence.generated for sequence in sequences]

    # Only a GPU has a cache with fixed scales.
    with installed(monkeypatch, stand_in=find_reference) if "kv_dtype" in settings else nullcontext():
        expected = generate(**({"device": "cuda"} if "kv_dtype" in settings else {}))
    # The tiny models have small heads, and float32 gives the same tokens on both.
    monkeypatch.setattr(flashinfer, "HEAD_DIMS", range(1, 257))
    monkeypatch.setattr(model_fit, "DTYPES", (torch.float32,))
    fake = FakeFlashInfer(on_stand_in)
    sizes = json.loads((folder / "config.json").read_text())
    fake.latent_dims = sizes.get("kv_lora_rank", 512), sizes.get("qk_rope_head_dim", 64)
    fake.latent_dtypes.append(torch.float32)
    monkeypatch.setattr(flashinfer, "LATENT_DIMS", (fake.latent_dims,))
    monkeypatch.setattr(FlashInfer, "load", classmethod(lambda cls, device: cls(fake, device)))
    monkeypatch.setattr(libraries.Library, "version", "0.6.18")
    with installed(monkeypatch, stand_in=find_reference) as gpu:
        assert generate(device="cuda", attention_backend="flashinfer") == expected
        assert fake.num_runs > 0
        assert gpu.allocated == 0
