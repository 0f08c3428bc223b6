"""Decodes of several adjacent tokens of a sequence, as when drafts are verified: exact results from shared reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from paged import Paged
from torch import Tensor
from variants import VARIANTS, first_visible

from quire.kernels import decode_splits
from quire.kernels.attention_variant import PLAIN, AttentionVariant
from quire.kernels.decode_splits import DecodeSplits, split_decodes, split_runs

SCALE = 0.3
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn
# Tokens of each sequence, and how many of them are in the step.
LENS, COUNTS = [1, 8, 33, 66, 20, 131, 64], [1, 8, 3, 6, 1, 11, 2]


@pytest.fixture(autouse=True)
def few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make items so small that short sequences have several."""
    monkeypatch.setattr(decode_splits, "NUM_EXTRA_ITEMS", 6)
    monkeypatch.setattr(decode_splits, "MIN_ITEM_LEN", 32)


class Step:
    """A step of decodes whose sequences have several rows, and its outputs by the kernel.

    Attributes:
        lens, tables: [S] and [S, M], of the rows.
        first_rows: [S].
    """

    def __init__(self, paged: Paged, counts: list[int], num_padding: int = 2) -> None:
        self.paged, self.counts = paged, counts
        device = paged.lens.device
        repeats = torch.tensor(counts, device=device)
        ends = repeats.cumsum(0)
        rows = torch.arange(int(ends[-1]), device=device)
        first_rows = (ends - repeats).repeat_interleave(repeats)
        before_last = ends.repeat_interleave(repeats) - 1 - rows
        padding = torch.zeros(num_padding, dtype=torch.int32, device=device)
        self.lens = torch.cat((paged.lens.repeat_interleave(repeats) - before_last.int(), padding))
        tables = paged.tables.repeat_interleave(repeats, dim=0)
        self.tables = torch.cat((tables, tables.new_zeros(num_padding, tables.shape[1])))
        padding_rows = torch.arange(len(rows), len(self.lens), device=device)
        self.first_rows = torch.cat((first_rows, padding_rows)).int()

    def splits(self, max_rows: int) -> DecodeSplits:
        return split_runs(self.lens, self.first_rows, max_rows)

    def decode(self, q: Tensor, splits: DecodeSplits, variant: AttentionVariant = PLAIN) -> Tensor:
        from quire.kernels.gpu.paged_decode import paged_decode_attention

        paged = self.paged
        return paged_decode_attention(
            q, paged.cache, self.tables, self.lens, SCALE, splits, variant, paged.scales
        )

    def expect(self, q: Tensor, out: Tensor, variant: AttentionVariant) -> None:
        """Compare each sequence's rows with exact attention, and those of padding with zeros."""
        tolerance, start = TOLERANCE[q.dtype], 0
        for sequence, count in enumerate(self.counts):
            own = slice(start, start + count)
            expected = self.paged.expected(sequence, q[own], SCALE, variant)
            torch.testing.assert_close(out[own].double().cpu(), expected, atol=tolerance, rtol=tolerance)
            start += count
        assert not out[start:].any()


def random_queries(step: Step, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Return queries as a view of a wider tensor, as in a model."""
    wide = torch.randn(len(step.lens), num_heads + 2, step.paged.cache.shape[4])
    return wide.to(step.lens.device, dtype)[:, :num_heads]


@pytest.mark.parametrize(
    ("shape", "dtype", "stored", "variant", "max_rows"),
    [
        # (query heads, KV heads, head_dim, block size)
        ((2, 2, 64, 16), torch.float32, None, "plain", 8),
        ((8, 2, 64, 16), torch.float16, None, "plain", 8),
        ((8, 1, 128, 8), torch.float16, None, "window", 6),
        ((7, 1, 96, 24), torch.bfloat16, None, "alibi", 3),
        ((5, 1, 80, 5), torch.float16, None, "window of one", 8),
        ((6, 2, 192, 16), torch.float32, None, "soft cap", 4),
        ((4, 2, 256, 32), torch.float16, FLOAT8, "chunk", 8),
        ((6, 1, 256, 7), torch.float32, None, "chunk and window", 8),
        ((6, 2, 512, 16), torch.float16, INT8, "sinks", 8),
        ((2, 1, 464, 16), torch.float32, FLOAT8, "all", 5),
        ((6, 2, 64, 16), torch.float16, FLOAT8, "all", 2),
        ((20, 1, 64, 16), torch.float16, INT8, "all", 8),
    ],
    ids=str,
)
def test_rows_of_a_run_decode_exactly(
    device: str,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    stored: torch.dtype | None,
    variant: str,
    max_rows: int,
) -> None:
    num_heads, num_kv_heads, head_dim, block_size = shape
    paged = Paged(LENS, block_size, num_kv_heads, head_dim, dtype, device, stored)
    made = VARIANTS[variant](num_heads, device)
    positions = [length - count for length, count in zip(LENS, COUNTS, strict=True)]
    paged.poison_before([first_visible(made, position) for position in positions])
    step = Step(paged, COUNTS)
    q = random_queries(step, num_heads, dtype)
    step.expect(q, step.decode(q, step.splits(max_rows), made), made)


@contextmanager
def counting_loads(tensor: Tensor) -> Iterator[list[int]]:
    """Count the bytes of a tensor that kernels load in Triton's interpreter, one entry for each load."""
    from triton.runtime.interpreter import InterpreterBuilder

    first, counted = tensor.data_ptr(), list[int]()
    end = first + tensor.numel() * tensor.itemsize
    load = InterpreterBuilder.create_masked_load

    def count(builder: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        read = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
        num_read = int(((read >= first) & (read < end)).sum())
        if num_read:
            counted.append(num_read * tensor.itemsize)
        return load(builder, ptrs, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", count)
        yield counted


@pytest.mark.parametrize(("group", "stored"), [(1, None), (7, None), (4, FLOAT8)], ids=str)
def test_keys_and_values_of_drafted_tokens_are_read_once(
    device: str, group: int, stored: torch.dtype | None
) -> None:
    """Six rows of each sequence load the bytes that one row would, and six times as many if they are no runs."""
    if device != "cpu":
        pytest.skip("counts loads in the interpreter")
    lens, count = [66, 100], 6
    paged = Paged(lens, 16, 1, 32, torch.float16, device, stored)
    step, single = Step(paged, [count] * 2), Step(paged, [1] * 2)
    tensors = [paged.cache] if paged.scales is None else [paged.cache, paged.scales]
    for tensor in tensors:
        bytes_per_token = 2 * tensor.itemsize * (32 if tensor is paged.cache else 1)
        loads = list[list[int]]()
        for each, splits in (
            (single, single.splits(8)),
            (step, step.splits(8)),
            (step, split_decodes(step.lens, 0)),
        ):
            with counting_loads(tensor) as counted:
                each.decode(random_queries(each, group, torch.float16), splits)
            loads.append(counted)
        of_single, of_runs, of_rows = loads
        assert sum(of_single) == sum(of_runs) == sum(lens) * bytes_per_token
        assert len(of_single) == len(of_runs)
        of_all = sum(sum(range(length - count + 1, length + 1)) for length in lens)
        assert sum(of_rows) == of_all * bytes_per_token


def test_rows_beyond_a_tile_read_keys_again_by_tile(device: str) -> None:
    """Of 20 heads per KV head, 3 tokens fit into the largest tile: 6 tokens read the keys twice, not 6 times."""
    if device != "cpu":
        pytest.skip("counts loads in the interpreter")
    paged = Paged([100], 16, 1, 64, torch.float16, device)
    step = Step(paged, [6])
    with counting_loads(paged.cache) as counted:
        step.decode(random_queries(step, 20, torch.float16), step.splits(6))
    assert sum(counted) == (100 + 97) * 2 * 64 * 2


@pytest.mark.parametrize("max_rows", [1, 3, 8])
def test_split_runs_covers_every_token_of_a_run_once(max_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        counts = torch.randint(1, 12, (6,), generator=generator).tolist()
        totals = [int(torch.randint(count, 700, (1,), generator=generator)) for count in counts]
        num_padding = 3
        lens, firsts, runs = list[int](), list[int](), list[tuple[int, int]]()
        for count, total in zip(counts, totals, strict=True):
            start = len(lens)
            lens += range(total - count + 1, total + 1)
            firsts += [start] * count
            cuts = range(start, start + count, max_rows)
            runs += [(cut, min(cut + max_rows, start + count)) for cut in cuts]
        padding = list(range(len(lens), len(lens) + num_padding))
        lens, firsts = lens + [0] * num_padding, firsts + padding
        splits = split_runs(
            torch.tensor(lens, dtype=torch.int32), torch.tensor(firsts, dtype=torch.int32), max_rows
        )
        assert splits.runs is not None
        item_len = int(splits.item_len)
        expected = [row for row, end in runs for _ in range(-(-lens[end - 1] // item_len))]
        items = splits.item_seqs.tolist()
        assert items == expected + [len(lens)] * (len(items) - len(expected))
        assert [int(splits.runs.ends[row]) for row, _ in runs] == [end for _, end in runs]
        num_parts = [-(-length // item_len) for length in lens]
        assert splits.runs.first_parts.diff().tolist() == num_parts
        # The workspace has as many places.
        assert sum(num_parts) <= len(lens) + decode_splits.NUM_EXTRA_ITEMS * max_rows
