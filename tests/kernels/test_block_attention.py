"""Attention to chosen blocks of keys: scores, choices, and the attention of each KV head to its own blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE

from quire.kernels import block_attention as ops

# Tokens of a block of the cache and of a chosen one, KV heads, query heads, numbers of a head and of an index key.
BLOCK, CHOSEN, KV_HEADS, HEADS, DIM, INDEX = 4, 12, 2, 6, 20, 10
LENS = [53, 5, 36, 1]
NUM_BLOCKS = 60


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def make_tables(generator: torch.Generator) -> Tensor:
    """Return shuffled blocks for all sequences, [S, M] int32."""
    width = -(-max(LENS) // BLOCK)
    return torch.randperm(NUM_BLOCKS - 1, generator=generator)[: len(LENS) * width].view(-1, width).int() + 1


def fill(cache: Tensor, tables: Tensor, sequences: list[Tensor]) -> None:
    """Write each sequence's [L, 2, H, D] to its blocks; other slots hold NaN."""
    cache.fill_(torch.nan)
    for table, tokens in zip(tables, sequences, strict=True):
        for position, token in enumerate(tokens):
            cache[table[position // BLOCK], :, :, position % BLOCK] = token


def choose_one_by_one(scores: Tensor, position: int, top_k: int, num_local: int) -> list[int]:
    """Return the blocks of one query and head, by its scores of keys [L]."""
    blocks = [scores[start : start + CHOSEN].max().item() for start in range(0, position + 1, CHOSEN)]
    own = position // CHOSEN
    best = {block: (block > own - num_local, score) for block, score in enumerate(blocks)}
    return sorted(sorted(best, key=lambda block: best[block], reverse=True)[:top_k])


@pytest.mark.parametrize(("top_k", "num_local"), [(2, 1), (3, 0), (3, 2), (9, 1)])
def test_queries_choose_their_local_and_their_best_blocks(
    top_k: int, num_local: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "TILE_BYTES", 1000)
    tables = make_tables(generator)
    cache = torch.empty(NUM_BLOCKS, 2, 1, BLOCK, INDEX // 2)
    keys = [torch.randn(length, INDEX, generator=generator) for length in LENS]
    fill(cache, tables, [own.view(-1, 2, 1, INDEX // 2) for own in keys])
    found = ops.gather_index_keys(cache, tables)[:, : max(LENS)]
    positions = torch.tensor([[length - 1] for length in LENS]).expand(-1, 3).clone()
    positions[0] = torch.tensor([11, 12, 40])
    q = torch.randn(len(LENS), 3, KV_HEADS, INDEX, generator=generator)
    scores = ops.score_blocks(q, found, positions, CHOSEN).flatten(0, 1)
    chosen, lens = ops.choose_blocks(scores, positions.flatten(), CHOSEN, top_k, num_local)
    for row, (own_chosen, own_lens) in enumerate(zip(chosen, lens, strict=True)):
        sequence, position = row // 3, int(positions.flatten()[row])
        for head in range(KV_HEADS):
            products = keys[sequence][: position + 1] @ q[sequence, row % 3, head]
            expected = choose_one_by_one(products, position, top_k, num_local)
            tokens = sum(min(CHOSEN, position + 1 - block * CHOSEN) for block in expected)
            assert own_chosen[head][: len(expected)].tolist() == expected
            assert own_lens[head] == tokens


def test_queries_choose_whole_blocks_and_the_tokens_behind_them(generator: torch.Generator) -> None:
    block_len, top_k = 5, 2
    keys = torch.randn(2, 4, INDEX, generator=generator)
    positions = torch.tensor([[3, 4, 14, 21], [19, 12, 9, 20]])
    q = torch.randn(2, 4, HEADS, INDEX, generator=generator)
    chosen, lens = ops.choose_pooled_blocks(q, keys, positions, block_len, top_k)
    for row, position in enumerate(positions.flatten().tolist()):
        num_whole, num_rest = divmod(position + 1, block_len)
        scores = (keys[row // 4, :num_whole] @ q[row // 4, row % 4].T).relu().sum(1)
        expected = sorted(scores.argsort(descending=True)[:top_k].tolist())
        expected += [num_whole] if num_rest else []
        assert chosen[row, 0, : len(expected)].tolist() == expected
        assert lens[row] == min(num_whole, top_k) * block_len + num_rest


@pytest.mark.parametrize("piece_len", [BLOCK, 2, 1])
@pytest.mark.parametrize("device", ["torch", DEVICE])
def test_kv_heads_attend_to_blocks_of_their_own(
    device: str, piece_len: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = make_tables(generator)
    cache = torch.empty(NUM_BLOCKS, 2, KV_HEADS, BLOCK, DIM)
    tokens = [torch.randn(length, 2, KV_HEADS, DIM, generator=generator) for length in LENS]
    fill(cache, tables, tokens)
    rows = torch.tensor([0, 0, 2, 3])
    chosen = torch.tensor([[[1, 4], [0, 4]], [[0, 2], [1, 3]], [[0, 2], [2, 2]], [[0, 0], [0, 0]]])
    lens = torch.tensor([[17, 17], [20, 24], [24, 12], [1, 1]], dtype=torch.int32)
    places = ops.chosen_tables(chosen, tables, rows, CHOSEN // piece_len, BLOCK // piece_len)
    q = torch.randn(len(rows), HEADS, DIM, generator=generator)
    if device == "torch":
        monkeypatch.setattr(ops, "TILE_BYTES", 1)
        found = ops.block_attention(q, cache, places, lens, 0.3, piece_len)
    else:
        pytest.importorskip("triton")
        from quire.kernels.gpu.paged_decode import paged_decode_attention

        monkeypatch.setattr(ops, "has_kernels", lambda tensor: True)
        monkeypatch.setattr(ops, "paged_decode_attention", paged_decode_attention)
        monkeypatch.setattr(ops, "MAX_SEQUENCES", 2 * KV_HEADS)
        cache.nan_to_num_(0.0)  # a kernel reads whole tiles of live slots only
        found = ops.block_attention(
            q.to(device), cache.to(device), places.to(device), lens.to(device), 0.3, piece_len
        ).cpu()
    for row in range(len(rows)):
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            ids = [
                position
                for block in chosen[row, kv_head].tolist()
                for position in range(block * CHOSEN, block * CHOSEN + CHOSEN)
            ][: lens[row, kv_head]]
            keys, values = tokens[rows[row]][ids, :, kv_head].unbind(1)
            expected = (keys @ q[row, head] * 0.3).softmax(0) @ values
            torch.testing.assert_close(found[row, head], expected, rtol=1e-4, atol=1e-4)
