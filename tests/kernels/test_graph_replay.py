"""Ops captured in a CUDA graph: a replay with other inputs gives the same bits as an eager call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from paged import Paged
from torch import Tensor
from variants import VARIANTS

from quire.kernels.block_tables import update_block_tables
from quire.kernels.decode_splits import split_decodes
from quire.kernels.fused_qk_norm_rope_kv_write import fused_qk_norm_rope_kv_write
from quire.kernels.paged_attention import paged_decode_attention, paged_prefill_attention
from quire.kernels.paged_cache import copy_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
STORED = pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn], ids=str)
VARIANT = pytest.mark.parametrize("variant", ["plain", "all"])


def expect_replayed(step: Callable[[], Tensor], inputs: dict[Tensor, Tensor]) -> None:
    """Capture the step, replay it with other inputs, and compare with an eager call.

    Args:
        step: reads the inputs and returns all its outputs.
        inputs: tensor |-> its new value.
    """
    step()  # compiles the kernels and allocates workspaces
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for tensor, value in inputs.items():
        tensor.copy_(value)
    graph.replay()
    replayed = captured.clone()
    for tensor, value in inputs.items():
        tensor.copy_(value)
    expected = step()
    assert torch.equal(replayed.view(torch.uint8), expected.view(torch.uint8))


@VARIANT
@STORED
def test_decode(stored: torch.dtype | None, variant: str) -> None:
    paged = Paged([300, 17, 1, 64], 16, 2, 64, torch.bfloat16, DEVICE, stored)
    q = torch.randn(4, 8, 64, device=DEVICE, dtype=torch.bfloat16)
    lens, made = torch.ones_like(paged.lens), VARIANTS[variant](8, DEVICE)

    def step() -> Tensor:
        splits = split_decodes(lens, paged.tables.shape[1] * 16)
        return paged_decode_attention(q, paged.cache, paged.tables, lens, 0.3, splits, made, paged.scales)

    expect_replayed(step, {lens: paged.lens, q: torch.randn_like(q)})


def test_decodes_of_one_graph_share_a_workspace() -> None:
    """Two decodes in one graph use the same workspace one after the other."""
    paged = Paged([3000, 2000], 16, 1, 64, torch.bfloat16, DEVICE)
    q = torch.randn(2, 2, 4, 64, device=DEVICE, dtype=torch.bfloat16)

    def step() -> Tensor:
        splits = split_decodes(paged.lens, paged.tables.shape[1] * 16)
        cache = paged.cache, paged.tables, paged.lens
        return torch.stack([paged_decode_attention(each, *cache, 0.3, splits) for each in q])

    expect_replayed(step, {q: torch.randn_like(q)})


@VARIANT
@STORED
def test_prefill(stored: torch.dtype | None, variant: str) -> None:
    paged = Paged([100, 70], 16, 2, 64, torch.bfloat16, DEVICE, stored)
    q = torch.randn(64, 8, 64, device=DEVICE, dtype=torch.bfloat16)
    starts = torch.tensor([0, 32, 64], dtype=torch.int32, device=DEVICE)
    made = VARIANTS[variant](8, DEVICE)

    def step() -> Tensor:
        tables = paged.tables
        return paged_prefill_attention(q, paged.cache, tables, starts, paged.lens, 0.3, made, paged.scales)

    expect_replayed(step, {starts: torch.tensor([0, 63, 64]), q: torch.randn_like(q)})


@STORED
def test_fused_qk_norm_rope_kv_write(stored: torch.dtype | None) -> None:
    heads = torch.randn(5, 8, 64, device=DEVICE, dtype=torch.bfloat16)
    given = torch.zeros_like(heads)
    cache = torch.zeros(4, 2, 2, 16, 64, device=DEVICE, dtype=stored or torch.bfloat16)
    scales = None if stored is None else torch.zeros(cache.shape[:-1], device=DEVICE)
    slots = torch.full((5,), -1, device=DEVICE)
    angles = torch.randn(5, 32, device=DEVICE, dtype=torch.bfloat16)

    def step() -> Tensor:
        scratch = given.clone()
        cache.view(torch.uint8).zero_()
        q = fused_qk_norm_rope_kv_write(scratch, cache, slots, angles, angles, kv_scales=scales)
        written = [q.contiguous(), cache] if scales is None else [q.contiguous(), cache, scales]
        return torch.cat([tensor.view(torch.uint8).flatten() for tensor in written])

    expect_replayed(step, {given: heads, slots: torch.tensor([17, -1, 63, 32, 16])})


def test_copy_blocks() -> None:
    caches = torch.randn(3, 6, 2, 2, 16, 64, device=DEVICE)
    sources, destinations = torch.tensor([1, 2], device=DEVICE), torch.tensor([3, 4], device=DEVICE)

    def step() -> Tensor:
        copied = caches.clone()
        copy_blocks(copied, sources, destinations)
        return copied

    expect_replayed(step, {sources: torch.tensor([5, 2]), destinations: torch.tensor([1, 0])})


def test_update_block_tables() -> None:
    entries = torch.tensor([[0, 1, 7], [2, 3, 9]], dtype=torch.int32, device=DEVICE)

    def step() -> Tensor:
        tables = torch.zeros(3, 8, dtype=torch.int32, device=DEVICE)
        update_block_tables(tables, entries)
        return tables

    expect_replayed(step, {entries: torch.tensor([[1, 0, 5], [0, 2, 6]])})
