"""The attention kernels against a float64 softmax over each sequence's own tokens; see test_paged_attention."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from paged import Paged
from quick_cases import diagonal
from torch import Tensor
from variants import VARIANTS, first_visible

from quire.kernels import decode_splits
from quire.kernels.attention_variant import PLAIN, AttentionVariant
from quire.kernels.decode_splits import split_decodes

SCALE = 0.3

# Both sides get inputs rounded to the type. The interpreter truncates float32 where a GPU rounds.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

STORED = {"as computed": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
# (query heads, KV heads, head_dim, block size)
SHAPES = [(8, 2, 64, 16), (2, 2, 80, 32), (7, 1, 96, 64), (20, 1, 128, 16), (2, 1, 256, 32)]


@pytest.fixture(autouse=True)
def few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make items so small that short sequences have several."""
    monkeypatch.setattr(decode_splits, "NUM_EXTRA_ITEMS", 6)
    monkeypatch.setattr(decode_splits, "MIN_ITEM_LEN", 32)


@pytest.fixture
def decode(device: str) -> Callable[..., Tensor]:
    from quire.kernels.gpu.paged_decode import paged_decode_attention

    return paged_decode_attention


@pytest.fixture
def prefill(device: str) -> Callable[..., Tensor]:
    from quire.kernels.gpu.paged_prefill import paged_prefill_attention

    return paged_prefill_attention


def random_queries(num_tokens: int, num_heads: int, head_dim: int, like: Tensor) -> Tensor:
    """Return queries as a view of a wider tensor, as in a model."""
    wide = torch.randn(num_tokens, num_heads + 2, head_dim)
    return wide.to(like.device, like.dtype)[:, :num_heads]


@pytest.mark.parametrize(("shape", "dtype"), diagonal(SHAPES, TOLERANCE), ids=str)
def test_decode(
    device: str, decode: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads, head_dim, block_size = shape
    lens = [1, block_size - 1, block_size, block_size + 1, 31, 33, 100]
    paged = Paged(lens, block_size, num_kv_heads, head_dim, dtype, device)
    q = random_queries(len(lens), num_heads, head_dim, paged.cache)
    out = decode(q, paged.cache, paged.tables, paged.lens, SCALE)
    expect_decoded(paged, q, out)


@pytest.mark.parametrize(
    ("dtype", "stored", "variant"),
    [
        *((torch.float16, "as computed", variant) for variant in VARIANTS),
        *((torch.float16, stored, "plain") for stored in ("int8", "fp8")),
        *diagonal(TOLERANCE, STORED, ["all"]),
    ],
    ids=str,
)
def test_decode_of_variants(
    device: str, decode: Callable[..., Tensor], dtype: torch.dtype, stored: str, variant: str
) -> None:
    lens = [1, 16, 19, 20, 21, 65, 130]
    paged = Paged(lens, 16, 2, 32, dtype, device, STORED[stored])
    q = random_queries(len(lens), 6, 32, torch.empty(0, dtype=dtype, device=device))
    made = VARIANTS[variant](6, device)
    paged.poison_before([first_visible(made, length - 1) for length in lens])
    out = decode(q, paged.cache, paged.tables, paged.lens, SCALE, None, made, paged.scales)
    expect_decoded(paged, q, out, made)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_decode_of_a_long_sequence(device: str, decode: Callable[..., Tensor], dtype: torch.dtype) -> None:
    paged = Paged([4097, 3], 16, 1, 64, dtype, device)
    q = random_queries(2, 4, 64, paged.cache)
    expect_decoded(paged, q, decode(q, paged.cache, paged.tables, paged.lens, SCALE))


def test_padding_rows_decode_to_zeros(device: str, decode: Callable[..., Tensor]) -> None:
    paged = Paged([70, 5], 16, 2, 64, torch.float32, device)
    q = random_queries(4, 4, 64, paged.cache)
    tables = torch.cat((paged.tables, torch.zeros_like(paged.tables)))
    lens = torch.cat((paged.lens, torch.zeros_like(paged.lens)))
    out = decode(q, paged.cache, tables, lens, SCALE)
    expect_decoded(paged, q, out)
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))


@pytest.mark.parametrize("window", [0, 33, 64, 100])
@pytest.mark.parametrize("item_len", [32, 64, 128])
def test_decode_does_not_depend_on_item_len(
    device: str, decode: Callable[..., Tensor], item_len: int, window: int
) -> None:
    paged = Paged([129, 127, 64, 1], 16, 1, 64, torch.float32, device)
    q = random_queries(4, 4, 64, paged.cache)
    splits = split_decodes(paged.lens, paged.tables.shape[1] * 16, fixed_item_len=item_len)
    variant = AttentionVariant(window)
    out = decode(q, paged.cache, paged.tables, paged.lens, SCALE, splits, variant)
    expect_decoded(paged, q, out, variant)


@pytest.mark.parametrize("variant", [PLAIN, AttentionVariant(window=100, soft_cap=3.0)])
def test_fixed_item_len_makes_decode_batch_invariant(
    device: str, decode: Callable[..., Tensor], variant: AttentionVariant
) -> None:
    paged = Paged([129, 300, 64], 16, 1, 64, torch.float32, device)
    q = random_queries(3, 4, 64, paged.cache)

    def outputs(rows: list[int]) -> Tensor:
        lens, tables = paged.lens[rows], paged.tables[rows]
        splits = split_decodes(lens, tables.shape[1] * 16, fixed_item_len=64)
        return decode(q[rows], paged.cache, tables, lens, SCALE, splits, variant)

    together = outputs([0, 1, 2])
    for row in range(3):
        assert torch.equal(outputs([row]), together[row : row + 1])


@pytest.mark.parametrize("fixed_item_len", [None, 64])
def test_split_decodes_covers_every_token_once(fixed_item_len: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        lens = torch.randint(0, 700, (7,), generator=generator, dtype=torch.int32)
        splits = split_decodes(lens, 700, fixed_item_len)
        item_len, firsts = splits.item_len.item(), splits.first_items.tolist()
        counts = [-(-length // item_len) for length in lens.tolist()]
        assert firsts == [sum(counts[:row]) for row in range(8)]
        assert len(splits.item_seqs) >= firsts[-1]
        owners = [row for row, count in enumerate(counts) for _ in range(count)]
        assert splits.item_seqs.tolist() == owners + [7] * (len(splits.item_seqs) - len(owners))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_prefill_in_large_tiles(
    device: str, prefill: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    group = shape[0] // shape[1]
    tile_queries = 64 // group
    expect_prefilled(
        prefill, shape, dtype, device, [(tile_queries + 1, 0), (tile_queries - 1, 33), (2 * tile_queries, 16)]
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_prefill_in_small_tiles(
    device: str, prefill: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    expect_prefilled(prefill, shape, dtype, device, [(1, 0), (2, 30), (1, 64), (0, 5), (1, 31)])


@pytest.mark.parametrize(
    ("tile", "stored", "variant"),
    [
        *(("large", "as computed", variant) for variant in VARIANTS),
        *(("large", stored, "plain") for stored in ("int8", "fp8")),
        *((tile, stored, "all") for tile in ("large", "small") for stored in ("int8", "fp8")),
        ("small", "as computed", "window of one"),
    ],
)
def test_prefill_of_variants(
    device: str, prefill: Callable[..., Tensor], tile: str, stored: str, variant: str
) -> None:
    chunks = {"large": [(23, 0), (50, 70)], "small": [(1, 0), (2, 30), (4, 64)]}[tile]
    made = VARIANTS[variant](4, device)
    expect_prefilled(prefill, (4, 1, 32, 16), torch.float16, device, chunks, made, STORED[stored])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_prefill_after_a_long_prefix(device: str, prefill: Callable[..., Tensor], dtype: torch.dtype) -> None:
    expect_prefilled(prefill, (4, 1, 64, 16), dtype, device, [(65, 4032), (1, 4096)])


def test_prefill_finds_tiles_of_chunks_of_every_length(device: str, prefill: Callable[..., Tensor]) -> None:
    """Tile numbers follow from the chunks' starts; the chunks cover each residue."""
    chunks = [(length, 0) for length in (3, 1, 0, 4, 5, 0, 0, 7, 8, 9, 2)]
    expect_prefilled(prefill, (4, 1, 16, 16), torch.float32, device, chunks)


def test_prefill_ignores_padding_after_the_chunks(device: str, prefill: Callable[..., Tensor]) -> None:
    paged = Paged([40], 16, 2, 64, torch.float32, device)
    q = random_queries(16, 4, 64, paged.cache)
    tables = torch.cat((paged.tables, torch.zeros_like(paged.tables)))
    lens = torch.cat((paged.lens, torch.zeros_like(paged.lens)))
    starts = torch.tensor([0, 10, 10], dtype=torch.int32, device=device)
    out = prefill(q, paged.cache, tables, starts, lens, SCALE)
    close(out[:10], paged.expected(0, q[:10], SCALE))


def expect_decoded(paged: Paged, q: Tensor, out: Tensor, variant: AttentionVariant = PLAIN) -> None:
    for row in range(len(paged.sequences)):
        close(out[row : row + 1], paged.expected(row, q[row : row + 1], SCALE, variant))


def expect_prefilled(
    prefill: Callable[..., Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    chunks: list[tuple[int, int]],
    variant: AttentionVariant = PLAIN,
    stored: torch.dtype | None = None,
) -> None:
    """Chunks are (length, cached prefix)."""
    num_heads, num_kv_heads, head_dim, block_size = shape
    paged = Paged([sum(chunk) for chunk in chunks], block_size, num_kv_heads, head_dim, dtype, device, stored)
    paged.poison_before([first_visible(variant, cached) for _, cached in chunks])
    starts = [0]
    for chunk_len, _ in chunks:
        starts.append(starts[-1] + chunk_len)
    q = random_queries(starts[-1], num_heads, head_dim, torch.empty(0, dtype=dtype, device=device))
    query_start = torch.tensor(starts, dtype=torch.int32, device=device)
    out = prefill(q, paged.cache, paged.tables, query_start, paged.lens, SCALE, variant, paged.scales)
    for row, (start, end) in enumerate(pairwise(starts)):
        close(out[start:end], paged.expected(row, q[start:end], SCALE, variant))


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double().cpu(), expected, atol=tolerance, rtol=tolerance)
