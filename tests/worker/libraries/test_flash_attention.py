"""Attention by FlashAttention 3, through a module with its signature that computes by definition."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from paged import Paged
from torch import Tensor
from variants import VARIANTS

from quire.kernels.attention_variant import AttentionVariant
from quire.kernels.paged_attention import paged_prefill_attention
from quire.worker.attention import AttentionInputs, LayerCache
from quire.worker.libraries.flash_attention import load_flash_attention
from quire.worker.libraries.installed import FLASH_ATTENTION

BLOCK_SIZE = 4


class FakeInterface(ModuleType):
    """The module of FlashAttention 3; its function has the signature of version 3.0."""

    num_calls = 0

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: None = None,
        v: None = None,
        qv: None = None,
        rotary_cos: None = None,
        rotary_sin: None = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: None = None,
        cache_leftpad: None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: None = None,
        q_descale: None = None,
        k_descale: None = None,
        v_descale: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: None = None,
        num_splits: int = 0,
        pack_gqa: None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        self.num_calls += 1
        assert cache_seqlens is not None
        assert page_table is not None
        assert cu_seqlens_q is not None
        assert max_seqlen_q is not None
        assert softmax_scale is not None
        assert causal
        assert k_cache.stride(-1) == v_cache.stride(-1) == 1
        out = torch.zeros_like(q)
        for index, seq_len in enumerate(cache_seqlens.tolist()):
            start, end = cu_seqlens_q[index : index + 2].tolist()
            assert end - start <= max_seqlen_q
            keys, values = (
                cache[page_table[index].long()].flatten(0, 1)[:seq_len].double()
                for cache in (k_cache, v_cache)
            )
            group = q.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q[start:end].double(), keys) * softmax_scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            places = torch.arange(seq_len)
            own = places[seq_len - (end - start) :, None]
            hidden = places > own
            if window_size[0] >= 0:
                hidden |= places < own - window_size[0]
            weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        return out


@pytest.fixture(params=FLASH_ATTENTION.modules)
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeInterface:
    name: str = request.param
    made = FakeInterface(name)
    for parent in name.split(".")[:-1]:
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.mark.parametrize(
    "variant", [AttentionVariant(), AttentionVariant(window=5), AttentionVariant(soft_cap=3.0)], ids=str
)
def test_chunks_equal_those_of_the_reference(module: FakeInterface, variant: AttentionVariant) -> None:
    paged = Paged([19, 7, 12], BLOCK_SIZE, 2, 16, torch.bfloat16, "cpu")
    q = torch.randn(19, 4, 16).bfloat16()
    starts = torch.tensor([0, 9, 10, 15], dtype=torch.int32)
    inputs = AttentionInputs(0, torch.zeros(19).long(), paged.tables, starts, paged.lens)
    attention = load_flash_attention()
    found = attention.prefill(q, LayerCache(paged.cache), inputs, 0.3, variant)
    expected = paged_prefill_attention(q, paged.cache, paged.tables, starts, paged.lens, 0.3, variant)
    assert (module.num_calls, attention.num_calls, attention.unsupported) == (1, 1, set())
    torch.testing.assert_close(found[:15].float(), expected[:15].float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("reason", "feature"),
    [
        ("alibi", "linear biases (ALiBi)"),
        ("quantized", "a quantized KV cache"),
        ("float32", "dtype float32"),
    ],
)
def test_others_are_computed_by_the_reference(module: FakeInterface, reason: str, feature: str) -> None:
    dtype = torch.float32 if reason == "float32" else torch.bfloat16
    stored = torch.int8 if reason == "quantized" else None
    paged = Paged([9], BLOCK_SIZE, 2, 16, dtype, "cpu", stored)
    variant = VARIANTS["all"](4, "cpu") if reason == "alibi" else AttentionVariant()
    starts = torch.tensor([0, 5], dtype=torch.int32)
    q = torch.randn(5, 4, 16).to(dtype)
    inputs = AttentionInputs(0, torch.zeros(5).long(), paged.tables, starts, paged.lens)
    attention = load_flash_attention()
    found = attention.prefill(q, LayerCache(paged.cache, paged.scales), inputs, 0.3, variant)
    own = q, paged.cache, paged.tables, starts, paged.lens, 0.3, variant, paged.scales
    assert torch.equal(found, paged_prefill_attention(*own))
    assert (module.num_calls, attention.num_calls, attention.unsupported) == (0, 0, {feature})


def test_missing_module_is_named() -> None:
    with pytest.raises(ImportError, match="no module flash_attn_interface or flash_attn_3"):
        load_flash_attention()
