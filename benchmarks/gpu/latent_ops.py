"""The ops of multi-head latent attention, with the heads and latents of the run's DeepSeek model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu.op_case import BLOCK_SIZE, Op, OpCase, random, shuffled_tables, slots_of
from benchmarks.gpu.sizes import Sizes
from quire.kernels.decode_splits import split_decodes
from quire.kernels.fused_latent_norm_rope_write import fused_latent_norm_rope_write
from quire.kernels.latent_attention import ChunkBounds, latent_decode_attention, latent_prefill_attention


def latent_cases(sizes: Sizes) -> Iterator[OpCase]:
    rows, length = sizes.decodes[-3]
    yield latent_decode_case(sizes, rows, length)
    yield latent_decode_case(sizes, *sizes.decodes[-1])
    yield latent_prefill_case(sizes, sizes.prefill_lens[-1])
    yield latent_write_case(sizes, sizes.prefill_lens[-1])


def latent_decode_case(sizes: Sizes, rows: int, length: int) -> OpCase:
    model = sizes.latent_model

    def make(index: int) -> Op:
        cache, tables = _random_cache(sizes, rows, length)
        q = random(sizes, rows, model.num_attention_heads, model.cached_dim)
        lens = torch.full((rows,), length, dtype=torch.int32, device=sizes.device)
        splits = split_decodes(lens, tables.shape[1] * BLOCK_SIZE)
        return lambda: latent_decode_attention(
            q, cache, tables, lens, model.attention_scale, model.kv_lora_rank, splits
        )

    num_bytes = rows * length * model.cached_dim * getattr(torch, sizes.dtype).itemsize
    flops = 2 * rows * length * model.num_attention_heads * (model.cached_dim + model.kv_lora_rank)
    return OpCase(f"latent_decode.{rows}x{length}", sizes.device, num_bytes, flops, make)


def latent_prefill_case(sizes: Sizes, length: int) -> OpCase:
    model = sizes.latent_model
    heads, key_value_dim = model.num_attention_heads, model.qk_nope_head_dim + model.v_head_dim

    def make(index: int) -> Op:
        cache, tables = _random_cache(sizes, 1, length)
        q = random(sizes, length, heads, model.qk_dim)
        expansion = random(sizes, heads, key_value_dim, model.kv_lora_rank) * model.kv_lora_rank**-0.5
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
        q = random(sizes, tokens, model.num_attention_heads, model.qk_dim)
        projected = random(sizes, tokens, model.cached_dim)
        angles = random(sizes, tokens, model.qk_rope_head_dim)
        weight, slots = random(sizes, model.kv_lora_rank), slots_of(tables, tokens)

        def write() -> tuple[Tensor, Tensor]:
            fused_latent_norm_rope_write(q, projected, cache, slots, angles, angles, weight, 1e-6, True)
            return q, cache

        return write

    numbers = 2 * model.cached_dim + 2 * model.num_attention_heads * model.qk_rope_head_dim
    num_bytes = tokens * numbers * getattr(torch, sizes.dtype).itemsize
    return OpCase(f"fused_latent_norm_rope_write.{tokens}", sizes.device, num_bytes, 0, make)


def _random_cache(sizes: Sizes, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Return latents in shuffled blocks, and the block tables."""
    tables, num_blocks = shuffled_tables(sizes, rows, length)
    return random(sizes, num_blocks, 1, 1, BLOCK_SIZE, sizes.latent_model.cached_dim), tables
