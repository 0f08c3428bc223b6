"""The ops of a step at serving shapes, each beside what PyTorch offers for it.

The peers of attention are scaled_dot_product_attention on contiguous keys and values, and FlashAttention 3 for
prompts where it is installed; those of other ops are PyTorch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.adapter_ops import adapter_cases
from benchmarks.gpu.block_float8_ops import block_float8_cases
from benchmarks.gpu.latent_ops import latent_cases
from benchmarks.gpu.libraries import attention_peers, decode_inputs, prefill_inputs
from benchmarks.gpu.op_case import (
    BLOCK_SIZE,
    Op,
    OpCase,
    random,
    rotations,
    shuffled_tables,
    slots_of,
    strided,
    with_gaps,
)
from benchmarks.gpu.sampler_ops import random_processors, sampler_cases
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.state_ops import state_cases
from benchmarks.kernel_peers import norm_by_torch, swiglu_by_torch
from quire.kernels.activation import clamped_silu_and_mul, gelu_tanh_and_mul, silu_and_mul
from quire.kernels.attention_variant import AttentionVariant
from quire.kernels.block_tables import update_block_tables
from quire.kernels.decode_splits import split_decodes
from quire.kernels.fused_qk_norm_rope_kv_write import fused_qk_norm_rope_kv_write
from quire.kernels.gumbel import random_keys
from quire.kernels.logits import process_logits
from quire.kernels.moe import ExpertWeights, gather_linear, gather_terms, scatter_linear, sort_choices
from quire.kernels.norm import add_rms_norm, add_rms_norm_float8, rms_norm
from quire.kernels.paged_attention import paged_decode_attention, paged_prefill_attention
from quire.kernels.paged_cache import copy_blocks, copy_scattered_blocks
from quire.kernels.quantized_kv import quantize as quantize_kv
from quire.kernels.quantized_linear import FLOAT8, float8_linear, quantize, quantized_linear
from quire.kernels.routing import Routing, select_experts
from quire.worker.attention import AttentionInputs, SplitRule


def cases(sizes: Sizes) -> Iterator[OpCase]:
    """Yield all cases, the most important first. Inputs are made by `make`, so that few of them exist at once."""
    yield from decodes(sizes)
    yield from prefills(sizes)
    yield from small_ops(sizes)
    yield from sampler_cases(sizes)
    yield from quantized_layers(sizes)
    for tokens in (16, 4096) if sizes.device == "cuda" else (4,):
        yield from expert_cases(sizes, tokens)
        yield from block_float8_cases(sizes, tokens)
    yield from latent_cases(sizes)
    yield from state_cases(sizes)
    yield from adapter_cases(sizes)
    yield from rarer_ops(sizes)


def decodes(sizes: Sizes) -> Iterator[OpCase]:
    for rows, length in sizes.decodes:
        yield decode_case(sizes, rows, length, None)
    rows, length = sizes.decodes[-2]
    for stored in (torch.int8, FLOAT8):
        yield decode_case(sizes, rows, length, stored)
    yield decode_case(sizes, rows, length, None, has_sinks=True)
    for rows, length in sizes.decodes[-2:]:
        yield drafts_case(sizes, rows, length)


def decode_case(
    sizes: Sizes, rows: int, length: int, stored: torch.dtype | None, *, has_sinks: bool = False
) -> OpCase:
    model, dtype = sizes.model, getattr(torch, sizes.dtype)
    heads, kv_heads, head_dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    numbers = rows * length * kv_heads * head_dim
    per_number = dtype.itemsize if stored is None else stored.itemsize + 4 / head_dim
    sinks = torch.linspace(-1.0, 1.0, heads, device=sizes.device) if has_sinks else None
    variant = AttentionVariant(sinks=sinks)

    def make(index: int) -> Op:
        cache, scales, tables = random_cache(sizes, rows, length, stored)
        q = strided(sizes, rows, heads, head_dim)
        lens = torch.full((rows,), length, dtype=torch.int32, device=sizes.device)
        splits = split_decodes(lens, tables.shape[1] * BLOCK_SIZE)
        scale = head_dim**-0.5
        return lambda: paged_decode_attention(q, cache, tables, lens, scale, splits, variant, scales)

    def make_sdpa(index: int) -> Op:
        q = random(sizes, rows, heads, 1, head_dim)
        keys, values = (random(sizes, rows, kv_heads, length, head_dim) for _ in "kv")
        return partial(F.scaled_dot_product_attention, q, keys, values, enable_gqa=True)

    def make_step(index: int) -> tuple[Tensor, Tensor, AttentionInputs]:
        cache, _, tables = random_cache(sizes, rows, length, None)
        lens = torch.full((rows,), length, dtype=torch.int32, device=sizes.device)
        return strided(sizes, rows, heads, head_dim), cache, decode_inputs(tables, lens)

    suffix = "" if stored is None else f".{str(stored).removeprefix('torch.')}"
    suffix += ".sinks" if has_sinks else ""
    peers = {"sdpa": make_sdpa} if not suffix else {}
    if stored is None:
        peers |= attention_peers(sizes.device, head_dim**-0.5, make_step, variant)
    return OpCase(
        f"decode{suffix}.{rows}x{length}", sizes.device, int(2 * numbers * per_number),
        4 * rows * length * heads * head_dim, make, peers,
    )  # fmt: skip


def drafts_case(sizes: Sizes, rows: int, length: int) -> OpCase:
    """Return the decode of sequences with drafted tokens, beside one that reads the keys for each token."""
    model, dtype, queries = sizes.model, getattr(torch, sizes.dtype), 1 + sizes.num_drafts
    heads, kv_heads, head_dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim

    def make_step(index: int) -> tuple[Tensor, Tensor, AttentionInputs]:
        cache, _, tables = random_cache(sizes, rows, length, None)
        lens = torch.arange(length - queries + 1, length + 1, dtype=torch.int32, device=sizes.device)
        inputs = decode_inputs(tables.repeat_interleave(queries, dim=0), lens.repeat(rows))
        return strided(sizes, rows * queries, heads, head_dim), cache, inputs

    def make(index: int, max_run_rows: int = queries) -> Op:
        q, cache, inputs = make_step(index)
        tables, lens = inputs.block_tables, inputs.seq_lens
        each_row = torch.arange(len(q), dtype=torch.int32, device=sizes.device)
        splits = SplitRule(max_run_rows=max_run_rows).split(
            lens, tables.shape[1] * BLOCK_SIZE, each_row // queries * queries
        )
        return lambda: paged_decode_attention(q, cache, tables, lens, head_dim**-0.5, splits)

    def make_alone(index: int) -> Op:
        return make(index, 1)

    peers = {"alone": make_alone} | attention_peers(sizes.device, head_dim**-0.5, make_step)
    return OpCase(
        f"decode.drafts.{rows}x{length}", sizes.device, 2 * rows * length * kv_heads * head_dim * dtype.itemsize,
        4 * rows * queries * length * heads * head_dim, make, peers,
    )  # fmt: skip


def prefills(sizes: Sizes) -> Iterator[OpCase]:
    for length in sizes.prefill_lens:
        yield prefill_case(sizes, length, None)
    yield prefill_case(sizes, sizes.prefill_lens[-1], FLOAT8)


def prefill_case(sizes: Sizes, length: int, stored: torch.dtype | None) -> OpCase:
    model = sizes.model
    heads, kv_heads, head_dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim

    def make(index: int) -> Op:
        cache, scales, tables = random_cache(sizes, 1, length, stored)
        q = strided(sizes, length, heads, head_dim)
        starts = torch.tensor([0, length], dtype=torch.int32, device=sizes.device)
        lens = starts[1:].clone()
        return lambda: paged_prefill_attention(
            q, cache, tables, starts, lens, head_dim**-0.5, kv_scales=scales
        )

    def make_step(index: int) -> tuple[Tensor, Tensor, AttentionInputs]:
        cache, _, tables = random_cache(sizes, 1, length, None)
        return strided(sizes, length, heads, head_dim), cache, prefill_inputs(tables, length)

    def make_sdpa(index: int) -> Op:
        q = random(sizes, 1, heads, length, head_dim)
        keys, values = (random(sizes, 1, kv_heads, length, head_dim) for _ in "kv")
        return partial(F.scaled_dot_product_attention, q, keys, values, is_causal=True, enable_gqa=True)

    suffix = "" if stored is None else ".float8"
    num_bytes = 2 * length * (heads + kv_heads) * head_dim * 2
    peers = {"sdpa": make_sdpa} if stored is None else {}
    if stored is None:
        peers |= attention_peers(sizes.device, head_dim**-0.5, make_step)
    flops = 2 * length * (length + 1) * heads * head_dim
    return OpCase(f"prefill{suffix}.{length}", sizes.device, num_bytes, flops, make, peers)


def small_ops(sizes: Sizes) -> Iterator[OpCase]:
    """Yield norm, activation, rotary embedding with the cache write, block copies and table updates."""
    model, device = sizes.model, sizes.device
    hidden, inner = model.hidden_size, model.intermediate_size
    num_heads = model.num_attention_heads + 2 * model.num_key_value_heads
    itemsize = getattr(torch, sizes.dtype).itemsize
    for tokens in (sizes.num_sampled[-1], sizes.prefill_lens[-1]):

        def make_norm(index: int, tokens: int = tokens) -> Op:
            x, residual = strided(sizes, tokens, hidden), strided(sizes, tokens, hidden)
            weight = random(sizes, hidden)
            return lambda: (add_rms_norm(x, residual, weight, 1e-5), residual)

        def make_norm_by_torch(index: int, tokens: int = tokens) -> Op:
            x, residual, weight = (
                random(sizes, tokens, hidden),
                random(sizes, tokens, hidden),
                random(sizes, hidden),
            )
            return partial(norm_by_torch, x, residual, weight)

        def make_rms_norm(index: int, tokens: int = tokens) -> Op:
            return partial(rms_norm, strided(sizes, tokens, hidden), random(sizes, hidden), 1e-5)

        def make_swiglu(index: int, tokens: int = tokens) -> Op:
            return partial(silu_and_mul, strided(sizes, tokens, 2 * inner))

        def make_swiglu_by_torch(index: int, tokens: int = tokens) -> Op:
            return partial(swiglu_by_torch, random(sizes, tokens, 2 * inner))

        def make_rotate(index: int, tokens: int = tokens) -> Op:
            heads = strided(sizes, tokens, num_heads, model.head_dim)
            rotation = rotations(sizes, tokens, model.head_dim)
            cache, _, tables = random_cache(sizes, 1, tokens, None)
            slots = slots_of(tables, tokens)
            return lambda: (fused_qk_norm_rope_kv_write(heads, cache, slots, *rotation), cache)

        row = tokens * itemsize
        yield OpCase(
            f"add_rms_norm.{tokens}", device, 4 * row * hidden, 0, make_norm, {"torch": make_norm_by_torch}
        )
        yield OpCase(f"rms_norm.{tokens}", device, 2 * row * hidden, 0, make_rms_norm)
        yield OpCase(
            f"silu_and_mul.{tokens}", device, 3 * row * inner, 0, make_swiglu, {"torch": make_swiglu_by_torch}
        )
        num_bytes = row * (2 * num_heads + 2) * model.head_dim
        yield OpCase(f"fused_qk_norm_rope_kv_write.{tokens}", device, num_bytes, 0, make_rotate)
    yield OpCase(
        "copy_blocks.8", device, 16 * BLOCK_SIZE * model.kv_numbers * itemsize, 0, partial(_make_copy, sizes)
    )
    yield OpCase(
        "swap_blocks.32", device, 64 * BLOCK_SIZE * model.kv_numbers * itemsize, 0, partial(_make_swap, sizes)
    )
    yield OpCase("update_block_tables.64", device, 64 * 16, 0, partial(_make_update, sizes))


def rarer_ops(sizes: Sizes) -> Iterator[OpCase]:
    """Yield ops of some models only, and ops that read little, at one size each."""
    hidden, inner, device = sizes.model.hidden_size, sizes.model.intermediate_size, sizes.device
    tokens, rows, vocab = sizes.prefill_lens[-1], sizes.num_sampled[-1], sizes.model.vocab_size
    row = tokens * getattr(torch, sizes.dtype).itemsize

    def make_geglu(index: int) -> Op:
        return partial(gelu_tanh_and_mul, random(sizes, tokens, 2 * inner))

    def make_clamped(index: int) -> Op:
        return partial(clamped_silu_and_mul, random(sizes, tokens, 2 * inner), 1.702, 7.0)

    def make_float8_norm(index: int) -> Op:
        x, residual = strided(sizes, tokens, hidden), strided(sizes, tokens, hidden)
        weight = random(sizes, hidden)

        def normalize() -> tuple[Tensor, ...]:
            codes, scales = add_rms_norm_float8(x, residual, weight, 1e-5)
            return codes.float() * scales, residual

        return normalize

    def make_processed_logits(index: int) -> Op:
        logits, members = torch.randn(rows, vocab, device=device), torch.arange(rows, device=device)
        return partial(process_logits, logits, members, random_processors(rows, vocab, device))

    def make_keys(index: int) -> Op:
        seeds = torch.arange(rows, device=device)
        return partial(random_keys, seeds, seeds + 1)

    yield OpCase(f"gelu_tanh_and_mul.{tokens}", device, 3 * row * inner, 0, make_geglu)
    yield OpCase(f"clamped_silu_and_mul.{tokens}", device, 3 * row * inner, 0, make_clamped)
    # The reference rounds the norm to bfloat16 first: some numbers then become the neighboring one of float8, by
    # which they differ by up to an eighth.
    yield OpCase(
        f"add_rms_norm_float8.{tokens}", device, int(3.5 * row * hidden), 0, make_float8_norm, tolerance=4e-2
    )
    yield OpCase(f"process_logits.{rows}", device, 10 * rows * vocab, 0, make_processed_logits)
    yield OpCase(f"random_keys.{rows}", device, 24 * rows, 0, make_keys)


def quantized_layers(sizes: Sizes) -> Iterator[OpCase]:
    """Yield linear layers of int8 weights, and of float8 weights and tokens, beside the unquantized one."""
    hidden, inner = sizes.model.hidden_size, sizes.model.intermediate_size
    dtype = getattr(torch, sizes.dtype)

    def weight_of() -> Tensor:
        return random(sizes, inner, hidden) * hidden**-0.5

    for tokens in (1, 64 if sizes.device == "cuda" else 4, sizes.prefill_lens[-1]):

        def make_plain(index: int, tokens: int = tokens) -> Op:
            return partial(F.linear, random(sizes, tokens, hidden), weight_of())

        def make_int8(index: int, tokens: int = tokens) -> Op:
            return partial(quantized_linear, random(sizes, tokens, hidden), quantize(weight_of(), torch.int8))

        def make_float8(index: int, tokens: int = tokens) -> Op:
            return partial(float8_linear, random(sizes, tokens, hidden), quantize(weight_of(), FLOAT8))

        flops, moved = 2 * tokens * hidden * inner, tokens * (hidden + inner) * dtype.itemsize
        peers = {"bf16": make_plain}
        num_bytes = hidden * inner + moved
        yield OpCase(f"linear.int8.{tokens}", sizes.device, num_bytes, flops, make_int8, peers)
        yield OpCase(f"linear.float8.{tokens}", sizes.device, num_bytes, flops, make_float8)


def expert_cases(sizes: Sizes, tokens: int) -> Iterator[OpCase]:
    """Yield the feed-forward network of a mixture of experts, of which each token takes 8 of 64.

    And its second product alone as adapters of experts need it, whose terms are not added up; and the choice of
    the best of four times as many experts, in groups.
    """
    count, top_k = (64, 8) if sizes.device == "cuda" else (4, 2)
    hidden, inner = sizes.model.hidden_size // 2, sizes.model.intermediate_size // 8
    dtype = getattr(torch, sizes.dtype)

    def draw() -> tuple[Tensor, Tensor]:
        """Return experts and factors [tokens, top_k]."""
        expert_ids = torch.rand(tokens, count, device=sizes.device).topk(top_k).indices
        return expert_ids, torch.rand(tokens, top_k, device=sizes.device)

    def make_weights(num_outputs: int, num_inputs: int) -> ExpertWeights:
        return ExpertWeights(random(sizes, count, num_outputs, num_inputs) * num_inputs**-0.5)

    def make(index: int) -> Op:
        gate_up, down = make_weights(2 * inner, hidden), make_weights(hidden, inner)
        x, (expert_ids, factors) = random(sizes, tokens, hidden), draw()

        def forward() -> Tensor:
            choices = sort_choices(expert_ids, count)
            return gather_linear(silu_and_mul(scatter_linear(x, gate_up, choices)), down, choices, factors)

        return forward

    def make_terms(index: int) -> Op:
        rows, (expert_ids, factors) = random(sizes, tokens * top_k, inner), draw()
        choices = sort_choices(expert_ids, count)
        return partial(gather_terms, rows, make_weights(hidden, inner), choices, factors)

    def make_routing(index: int) -> Op:
        scores = random(sizes, tokens, 4 * count).float().sigmoid()
        correction = random(sizes, 4 * count).float() / 4
        own = Routing(4 * count, top_k, 4, 2, 2, normalized=True, scale=2.5)
        return partial(select_experts, scores, correction, own)

    num_read, num_products = min(count, tokens * top_k), tokens * top_k * hidden * inner
    num_bytes = num_read * hidden * inner * dtype.itemsize
    yield OpCase(f"experts.{tokens}", sizes.device, 3 * num_bytes, 6 * num_products, make)
    yield OpCase(f"expert_terms.{tokens}", sizes.device, num_bytes, 2 * num_products, make_terms)
    yield OpCase(f"routing.{tokens}", sizes.device, tokens * (16 * count + 12 * top_k), 0, make_routing)


def _make_copy(sizes: Sizes, index: int) -> Op:
    model = sizes.model
    shape = model.num_hidden_layers, 24, 2, model.num_key_value_heads, BLOCK_SIZE, model.head_dim
    caches = random(sizes, *shape)
    ids = torch.arange(16, device=sizes.device)

    def copy() -> Tensor:
        copy_blocks(caches, ids[:8], ids[8:])
        return caches

    return copy


def _make_swap(sizes: Sizes, index: int) -> Op:
    """Return copies of every other block to the host, in another order."""
    model = sizes.model
    shape = model.num_hidden_layers, 65, 2, model.num_key_value_heads, BLOCK_SIZE, model.head_dim
    caches = random(sizes, *shape)
    host = torch.zeros(shape, dtype=caches.dtype, pin_memory=sizes.device == "cuda")
    pairs = torch.stack((torch.arange(1, 65, 2), torch.arange(32, 0, -1)), dim=1).to(sizes.device)

    def swap() -> Tensor:
        copy_scattered_blocks(pairs, caches, host)
        return host

    return swap


def _make_update(sizes: Sizes, index: int) -> Op:
    tables = torch.zeros(64, 64, dtype=torch.int32, device=sizes.device)
    entries = torch.arange(64, dtype=torch.int32, device=sizes.device).view(-1, 1).repeat(1, 3)

    def update() -> Tensor:
        update_block_tables(tables, entries)
        return tables

    return update


def random_cache(
    sizes: Sizes, rows: int, length: int, stored: torch.dtype | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return a cache in shuffled blocks, the scales of a quantized one, and the block tables."""
    model = sizes.model
    tables, num_blocks = shuffled_tables(sizes, rows, length)
    shape = num_blocks, 2, model.num_key_value_heads, BLOCK_SIZE, model.head_dim
    cache = torch.empty(shape, dtype=stored or getattr(torch, sizes.dtype), device=sizes.device)
    scales = None if stored is None else torch.empty(shape[:-1], device=sizes.device)
    # In parts, because the float32 numbers of the largest cache would need twice its memory.
    for part in range(0, num_blocks, 4096):
        numbers = torch.randn(cache[part : part + 4096].shape, device=sizes.device)
        if scales is None or stored is None:
            cache[part : part + 4096] = numbers
        else:
            cache[part : part + 4096], scales[part : part + 4096] = quantize_kv(numbers, stored)
    # A quantized cache must be contiguous; the blocks of others may be parts of larger ones.
    return cache if stored else with_gaps(cache), scales, tables
