"""Paged attention against a float64 softmax over each sequence's own tokens, at odd lengths and shuffled blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from paged import Paged
from torch import Tensor
from variants import VARIANTS, first_visible

from quire.kernels import paged_attention
from quire.kernels.attention_variant import AttentionVariant
from quire.kernels.native import ops as cpu
from quire.kernels.native.library import is_available
from quire.kernels.paged_attention import (
    paged_decode_attention,
    paged_prefill_attention,
    paged_span_attention,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
LENGTHS = [1, 15, 16, 17, 31, 33, 100, 257]
STORED = {"as computed": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


@pytest.fixture(params=["native", "reference"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Select the CPU implementation: the C++ op, if it supports the shape, or PyTorch."""
    if request.param == "reference":
        monkeypatch.setattr(cpu, "supports_attention", lambda q, kv_cache: False)
    elif not is_available():
        pytest.skip("there is no C++ compiler")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(8, 2, 32), (4, 4, 80), (6, 1, 16)])
@pytest.mark.parametrize("block_size", [16, 8])
def test_decode(
    block_size: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    paged = Paged(LENGTHS, block_size, num_kv_heads, head_dim, dtype)
    q = torch.randn(len(LENGTHS), num_heads, head_dim).to(dtype)
    out = paged_decode_attention(q, paged.cache, paged.tables, paged.lens, 0.3)
    for row in range(len(LENGTHS)):
        close(out[row : row + 1], paged.expected(row, q[row : row + 1], 0.3))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(8, 2, 32), (4, 4, 80), (6, 1, 16)])
def test_prefill(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "QUERY_TILE_LEN", 64)
    paged = Paged(LENGTHS, 16, num_kv_heads, head_dim, dtype)
    chunk_lens = [1, 15, 3, 0, 31, 1, 64, 129]
    q = torch.randn(sum(chunk_lens), num_heads, head_dim).to(dtype)
    bounds = torch.tensor([0, *torch.tensor(chunk_lens).cumsum(0)], dtype=torch.int32)
    out = paged_prefill_attention(q, paged.cache, paged.tables, bounds, paged.lens, 0.3)
    for row in range(len(LENGTHS)):
        own = slice(bounds[row], bounds[row + 1])
        close(out[own], paged.expected(row, q[own], 0.3))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("settings", [{}, {"window": 7}, {"window": 40, "soft_cap": 5.0}, {"window": 1000}])
def test_tokens_of_a_span_attend_to_its_end(
    settings: dict[str, Any], stored: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "QUERY_TILE_LEN", 16)
    variant, start, end = AttentionVariant(**settings), 61, 100
    paged = Paged([end], 16, 2, 32, dtype, stored=STORED[stored])
    q = torch.randn(end - start, 6, 32).to(dtype)
    if variant.window:
        paged.poison_before([max(0, start + 1 - variant.window)])
    out = paged_span_attention(q, paged.cache, paged.tables[0], start, end, 0.3, variant, paged.scales)
    for index in range(len(q)):
        # A token sees what the last one would with a window that is longer by their distance.
        longer = variant.window and variant.window + len(q) - 1 - index
        expected = paged.expected(0, q[index : index + 1], 0.3, replace(variant, window=longer))
        close(out[index : index + 1], expected)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("length", [61, 64, 125])
def test_one_query_of_many_heads_ignores_the_padding_after_its_last_key(length: int) -> None:
    paged = Paged([length], 16, num_kv_heads=1, head_dim=32, dtype=torch.float32)
    q = torch.randn(1, 32, 32)
    out = paged_prefill_attention(
        q, paged.cache, paged.tables, torch.tensor([0, 1], dtype=torch.int32), paged.lens, 0.3
    )
    close(out, paged.expected(0, q, 0.3))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_decode_of_variants(dtype: torch.dtype, stored: str, variant: str) -> None:
    paged = Paged(LENGTHS, 16, 2, 32, dtype, stored=STORED[stored])
    made = VARIANTS[variant](6, "cpu")
    q = torch.randn(len(LENGTHS), 6, 32).to(dtype)
    paged.poison_before([first_visible(made, length - 1) for length in LENGTHS])
    out = paged_decode_attention(
        q, paged.cache, paged.tables, paged.lens, 0.3, variant=made, kv_scales=paged.scales
    )
    for row in range(len(LENGTHS)):
        close(out[row : row + 1], paged.expected(row, q[row : row + 1], 0.3, made))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_prefill_of_variants(
    dtype: torch.dtype, stored: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "QUERY_TILE_LEN", 64)
    paged = Paged(LENGTHS, 16, 2, 32, dtype, stored=STORED[stored])
    made = VARIANTS[variant](6, "cpu")
    chunk_lens = [1, 15, 3, 0, 31, 1, 64, 129]
    q = torch.randn(sum(chunk_lens), 6, 32).to(dtype)
    firsts = [first_visible(made, length - n) for length, n in zip(LENGTHS, chunk_lens, strict=True)]
    paged.poison_before(firsts)
    bounds = torch.tensor([0, *torch.tensor(chunk_lens).cumsum(0)], dtype=torch.int32)
    out = paged_prefill_attention(q, paged.cache, paged.tables, bounds, paged.lens, 0.3, made, paged.scales)
    for row in range(len(LENGTHS)):
        own = slice(bounds[row], bounds[row + 1])
        close(out[own], paged.expected(row, q[own], 0.3, made))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    ("stored", "variant"),
    [*(("as computed", variant) for variant in VARIANTS), ("int8", "all"), ("fp8", "all")],
)
def test_long_sequences_are_batch_invariant(stored: str, variant: str) -> None:
    """Splits do not depend on the other sequences, so a sequence alone gives the same bits."""
    lens = [4097, 1, 255, 256, 257, 1000]
    paged = Paged(lens, 16, 1, 64, torch.float32, stored=STORED[stored])
    made = VARIANTS[variant](4, "cpu")
    made = replace(made, window=700) if made.window > 1 else made
    q = torch.randn(len(lens), 4, 64)
    options: dict[str, Any] = {"variant": made, "kv_scales": paged.scales}
    out = paged_decode_attention(q, paged.cache, paged.tables, paged.lens, 0.3, **options)
    for row in range(len(lens)):
        own = slice(row, row + 1)
        close(out[own], paged.expected(row, q[own], 0.3, made))
        alone = paged_decode_attention(
            q[own], paged.cache, paged.tables[own], paged.lens[own], 0.3, **options
        )
        torch.testing.assert_close(alone, out[own], atol=1e-6, rtol=1e-6)
        if cpu.supports_attention(q, paged.cache):
            assert torch.equal(alone, out[own])
    start, end = 4097 - 70, 4097
    q = torch.randn(end - start, 4, 64)
    bounds = torch.tensor([0, len(q)], dtype=torch.int32)
    cache = paged.cache, paged.tables[:1], bounds, paged.lens[:1]
    close(paged_prefill_attention(q, *cache, 0.3, **options), paged.expected(0, q, 0.3, made))


@pytest.mark.skipif(not is_available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stored", STORED)
def test_chunks_have_the_bits_of_the_whole_prompt(stored: str, variant: str) -> None:
    """Chunks begin within tiles of queries and of keys, and end within them."""
    length = 300
    paged = Paged([length], 16, 2, 32, torch.float32, stored=STORED[stored])
    made = VARIANTS[variant](6, "cpu")
    q = torch.randn(length, 6, 32)

    def attend(begin: int, end: int) -> Tensor:
        bounds = torch.tensor([0, end - begin], dtype=torch.int32)
        lens = torch.tensor([end], dtype=torch.int32)
        return paged_prefill_attention(
            q[begin:end], paged.cache, paged.tables, bounds, lens, 0.3, made, paged.scales
        )

    whole = attend(0, length)
    close(whole, paged.expected(0, q, 0.3, made))
    for begin, end in pairwise([0, 1, 63, 70, 131, 133, length]):
        assert torch.equal(attend(begin, end), whole[begin:end])


@pytest.mark.skipif(not is_available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("num_heads", [2, 6])
def test_consecutive_tokens_of_a_sequence_have_the_bits_of_each_alone(
    num_heads: int, stored: str, variant: str
) -> None:
    newest = [1, 15, 250, 254, 300, 30]  # of each sequence; those before it are drafted from
    counts = [1, 3, 8, 5, 4, 1]
    paged = Paged([len_ + count for len_, count in zip(newest, counts, strict=True)], 16, 2, 32, torch.bfloat16,
                  stored=STORED[stored])  # fmt: skip
    rows = torch.repeat_interleave(torch.arange(len(newest)), torch.tensor(counts))
    lens = torch.cat([torch.arange(len_, len_ + count) for len_, count in zip(newest, counts, strict=True)])
    q = torch.randn(len(rows), num_heads, 32).bfloat16()
    made = VARIANTS[variant](num_heads, "cpu")
    arguments = 0.3, None, made, paged.scales
    tables, lens = paged.tables[rows], lens.int()
    together = paged_decode_attention(q, paged.cache, tables, lens, *arguments)
    for i in range(len(rows)):
        own = slice(i, i + 1)
        alone = paged_decode_attention(q[own], paged.cache, tables[own], lens[own], *arguments)
        assert torch.equal(together[own], alone)


@pytest.mark.skipif(not is_available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stored", STORED)
def test_sequences_that_share_blocks_have_the_bits_of_each_alone(stored: str, variant: str) -> None:
    """Neighbors share blocks within a split, whole splits, or all of the shorter one's; 18 are too many at once."""
    lens = [700, 300, 520, 520, 90, 513, 256, 257, *[530] * 18, 40]
    num_shared = [0, 18, 16, 32, 3, 5, 16, 16, 16, *[32] * 17, 0]  # blocks of the sequence before
    paged = Paged(lens, 16, 2, 32, torch.bfloat16, stored=STORED[stored])
    for row, count in enumerate(num_shared):
        paged.tables[row, :count] = paged.tables[row - 1, :count]
        paged.sequences[row][:, : 16 * count] = paged.sequences[row - 1][:, : 16 * count]
    q = torch.randn(len(lens), 6, 32).bfloat16()
    made = VARIANTS[variant](6, "cpu")
    arguments = 0.3, None, made, paged.scales
    together = paged_decode_attention(q, paged.cache, paged.tables, paged.lens, *arguments)
    for row in range(len(lens)):
        own = slice(row, row + 1)
        alone = paged_decode_attention(q[own], paged.cache, paged.tables[own], paged.lens[own], *arguments)
        assert torch.equal(together[own], alone)
        close(alone, paged.expected(row, q[own], 0.3, made))


def test_padding_rows_do_not_affect_other_rows() -> None:
    paged = Paged([20, 5], 16, 2, 16, torch.float32)
    q = torch.randn(3, 4, 16)
    tables = torch.cat((paged.tables, torch.zeros(1, 3, dtype=torch.int32)))
    lens = torch.cat((paged.lens, torch.zeros(1, dtype=torch.int32)))
    out = paged_decode_attention(q, paged.cache, tables, lens, 0.25)
    for row in range(2):
        close(out[row : row + 1], paged.expected(row, q[row : row + 1], 0.25))


def test_decode_supports_strided_queries() -> None:
    paged = Paged([20, 5], 16, 2, 16, torch.float32)
    wide = torch.randn(2, 8, 16)
    q = wide[:, :4]
    for row in range(2):
        out = paged_decode_attention(q, paged.cache, paged.tables, paged.lens, 0.25)
        close(out[row : row + 1], paged.expected(row, q[row : row + 1], 0.25))


def test_short_and_long_sequences_are_grouped_separately() -> None:
    groups = list(paged_attention._group_by_length([1, 500, 2, 1, 400, 3]))
    assert sorted(member for group in groups for member in group) == list(range(6))
    assert not any(1 in group and 0 in group for group in groups)


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def test_attention_reads_a_cache_whose_blocks_are_parts_of_larger_ones() -> None:
    """The C++ ops read dense caches only."""
    paged, q = Paged([33, 5], 4, 2, 16, torch.float32), torch.randn(2, 4, 16)
    wide = torch.zeros(len(paged.cache), paged.cache[0].numel() + 16)
    apart = wide[:, :-16].view(paged.cache.shape).copy_(paged.cache)
    out = paged_decode_attention(q, apart, paged.tables, paged.lens, 0.25)
    for row in range(2):
        close(out[row : row + 1], paged.expected(row, q[row : row + 1], 0.25))
