"""The ops of multi-head latent attention, with the heads and latents of the run's DeepSeek model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu.libraries import decode_inputs, latent_peers
from benchmarks.gpu.op_case import (
    BLOCK_SIZE,
    Op,
    OpCase,
    random,
    rotations,
    shuffled_tables,
    slots_of,
    strided,
)
from benchmarks.gpu.sizes import Sizes
from quire.kernels.decode_splits import split_decodes
from quire.kernels.fused_latent_norm_rope_write import fused_latent_norm_rope_write
from quire.kernels.latent_attention import (
    ChunkBounds,
    Expansion,
    latent_decode_attention,
    latent_prefill_attention,
)
from quire.kernels.sparse_latent import choose_tokens, index_scores, sparse_latent_attention
from quire.kernels.sparse_latent import slots_of as chosen_slots
from quire.worker.attention import AttentionInputs

# Heads, numbers of a key, and chosen tokens of DeepSeek-V3.2's indexers.
INDEX_HEADS, INDEX_DIM, TOP_K = 64, 128, 2048


def latent_cases(sizes: Sizes) -> Iterator[OpCase]:
    rows, length = sizes.decodes[-3]
    yield latent_decode_case(sizes, rows, length)
    yield latent_decode_case(sizes, *sizes.decodes[-1])
    yield latent_prefill_case(sizes, sizes.prefill_lens[-1])
    yield latent_write_case(sizes, sizes.prefill_lens[-1])
    rows, length = sizes.decodes[-1]
    yield index_scores_case(sizes, rows, length)
    yield sparse_decode_case(sizes, rows, length)


def latent_decode_case(sizes: Sizes, rows: int, length: int) -> OpCase:
    model = sizes.latent_model

    def make(index: int) -> Op:
        cache, tables = _random_cache(sizes, rows, length)
        q = strided(sizes, rows, model.num_attention_heads, model.cached_dim)
        lens = torch.full((rows,), length, dtype=torch.int32, device=sizes.device)
        splits = split_decodes(lens, tables.shape[1] * BLOCK_SIZE)
        return lambda: latent_decode_attention(
            q, cache, tables, lens, model.attention_scale, model.kv_lora_rank, splits
        )

    def make_step(index: int) -> tuple[Tensor, Tensor, AttentionInputs]:
        cache, tables = _random_cache(sizes, rows, length)
        q = strided(sizes, rows, model.num_attention_heads, model.cached_dim)
        lens = torch.full((rows,), length, dtype=torch.int32, device=sizes.device)
        return q, cache, decode_inputs(tables, lens)

    num_bytes = rows * length * model.cached_dim * getattr(torch, sizes.dtype).itemsize
    flops = 2 * rows * length * model.num_attention_heads * (model.cached_dim + model.kv_lora_rank)
    peers = latent_peers(sizes.device, model.attention_scale, model.kv_lora_rank, make_step)
    return OpCase(f"latent_decode.{rows}x{length}", sizes.device, num_bytes, flops, make, peers)


def latent_prefill_case(sizes: Sizes, length: int) -> OpCase:
    model = sizes.latent_model
    heads, key_value_dim = model.num_attention_heads, model.qk_nope_head_dim + model.v_head_dim

    def make(index: int) -> Op:
        cache, tables = _random_cache(sizes, 1, length)
        q = strided(sizes, length, heads, model.qk_dim)
        matrix = random(sizes, heads, key_value_dim, model.kv_lora_rank) * model.kv_lora_rank**-0.5
        expansion = Expansion.of(matrix, model.qk_nope_head_dim)
        starts = torch.tensor([0, length], dtype=torch.int32, device=sizes.device)
        bounds = ChunkBounds([length], [length])
        return lambda: latent_prefill_attention(
            q, cache, tables, starts, starts[1:].clone(), bounds, model.attention_scale, expansion
        )

    num_bytes = length * (model.cached_dim + heads * key_value_dim) * 2
    attention = length * (length + 1) * heads * (model.qk_dim + model.v_head_dim)
    flops = attention + 2 * length * heads * key_value_dim * model.kv_lora_rank
    return OpCase(f"latent_prefill.{length}", sizes.device, num_bytes, flops, make)


def latent_write_case(sizes: Sizes, tokens: int) -> OpCase:
    """Return the op that writes the latents of a prompt to the cache, and rotates its queries."""
    model = sizes.latent_model

    def make(index: int) -> Op:
        cache, tables = _random_cache(sizes, 1, tokens)
        q = strided(sizes, tokens, model.num_attention_heads, model.qk_dim)
        projected = strided(sizes, tokens, model.cached_dim)
        rotation = rotations(sizes, tokens, model.qk_rope_head_dim)
        weight, slots = random(sizes, model.kv_lora_rank), slots_of(tables, tokens)

        def write() -> tuple[Tensor, Tensor]:
            fused_latent_norm_rope_write(q, projected, cache, slots, *rotation, weight, 1e-6, True)
            return q, cache

        return write

    numbers = 2 * model.cached_dim + 2 * model.num_attention_heads * model.qk_rope_head_dim
    num_bytes = tokens * numbers * getattr(torch, sizes.dtype).itemsize
    return OpCase(f"fused_latent_norm_rope_write.{tokens}", sizes.device, num_bytes, 0, make)


def index_scores_case(sizes: Sizes, rows: int, length: int) -> OpCase:
    """Return the op that scores all tokens for one new token per sequence."""

    def make(index: int) -> Op:
        cache, tables = _random_cache(sizes, rows, length, INDEX_DIM)
        keys = cache[..., sizes.latent_model.cached_dim :]
        q = random(sizes, rows, INDEX_HEADS, INDEX_DIM)
        weights = torch.rand(rows, INDEX_HEADS, device=sizes.device)
        sequences = torch.arange(rows, device=sizes.device)
        lens = torch.full((rows,), length, dtype=torch.int32, device=sizes.device)
        top_k = min(TOP_K, length // 2)
        # Scores past the length are undefined.
        return lambda: index_scores(q, weights, keys, tables, sequences, lens, top_k)[:, :length]

    num_bytes = rows * length * INDEX_DIM * getattr(torch, sizes.dtype).itemsize
    flops = 2 * rows * length * INDEX_HEADS * INDEX_DIM
    return OpCase(f"index_scores.{rows}x{length}", sizes.device, num_bytes, flops, make)


def sparse_decode_case(sizes: Sizes, rows: int, length: int) -> OpCase:
    """Return the attention of one new token per sequence to tokens chosen by random scores."""
    model, top_k = sizes.latent_model, min(TOP_K, length // 2)

    def make(index: int) -> Op:
        cache, tables = _random_cache(sizes, rows, length, INDEX_DIM)
        latents = cache[..., : model.cached_dim]
        q = random(sizes, rows, model.num_attention_heads, model.cached_dim)
        scores = torch.rand(rows, tables.shape[1] * BLOCK_SIZE, device=sizes.device)
        sequences = torch.arange(rows, device=sizes.device)
        lens = torch.full((rows,), length, dtype=torch.int32, device=sizes.device)
        chosen = choose_tokens(scores, lens, top_k)
        selected = chosen_slots(chosen, tables, sequences, BLOCK_SIZE, top_k)
        return lambda: sparse_latent_attention(
            q, latents, *selected, model.attention_scale, model.kv_lora_rank
        )

    num_bytes = rows * top_k * model.cached_dim * getattr(torch, sizes.dtype).itemsize
    flops = 2 * rows * top_k * model.num_attention_heads * (model.cached_dim + model.kv_lora_rank)
    return OpCase(f"sparse_latent.{rows}x{length}", sizes.device, num_bytes, flops, make)


def _random_cache(sizes: Sizes, rows: int, length: int, index_dim: int = 0) -> tuple[Tensor, Tensor]:
    """Return latents, with keys of an indexer behind them, in shuffled blocks, and the block tables."""
    tables, num_blocks = shuffled_tables(sizes, rows, length)
    width = sizes.latent_model.cached_dim + index_dim
    return random(sizes, num_blocks, 1, 1, BLOCK_SIZE, width), tables
