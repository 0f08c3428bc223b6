"""Launches of every Triton kernel at serving shapes, on CPU tensors, for compile_kernels.py."""

from __future__ import annotations

import itertools

import torch
from launched_kernels import FLOAT8_CAPABILITY
from model_shapes import LatentShape, head_shapes, latent_shapes
from routings import ROUTINGS

from quire.kernels.all_reduce_norm import NUM_SIGNALS, Peers
from quire.kernels.attention_variant import PLAIN, AttentionVariant
from quire.kernels.decode_splits import MAX_RUN_ROWS, split_decodes, split_runs
from quire.kernels.gpu import (
    activation,
    all_reduce_norm,
    block_tables,
    float8_groups,
    fused_latent_norm_rope_write,
    fused_qk_norm_rope_kv_write,
    gumbel,
    index_scores,
    latent_decode,
    latent_prefill,
    lora,
    moe,
    norm,
    paged_cache,
    paged_decode,
    paged_prefill,
    process_logits,
    quantize_tokens,
    quantized_linear,
    recurrence,
    routing,
    sample_full,
    sample_top_k_top_p,
    sparse_latent,
    topk_tokens,
)
from quire.kernels.latent_attention import ChunkBounds, Expansion
from quire.kernels.logits import Biases, LogitsProcessors, Masks, Penalties
from quire.kernels.lora import LoraGroups, make_factors
from quire.kernels.moe import ExpertWeights
from quire.kernels.quantized_linear import FLOAT4, QuantizedWeight
from quire.kernels.state_runs import StateRuns


def launch_everything(capability: int) -> None:
    """Launch every kernel that a GPU of this compute capability can run."""
    launch_all_attention()
    launch_small_ops()
    launch_sampler()
    launch_quantized_linear(capability)
    launch_experts(capability)
    launch_routing()
    launch_adapters()
    launch_recurrences()


def launch_all_attention() -> None:
    """Launch attention with the sizes of every registered model, and its variants with every head dim of them."""
    everything = AttentionVariant(4096, 50.0, torch.zeros(8), torch.zeros(8))
    shapes = head_shapes()
    for num_heads, num_kv_heads, head_dim in shapes:
        launch_attention(num_heads, num_kv_heads, head_dim, 16, torch.bfloat16)
        launch_attention(8, 2, head_dim, 64, torch.float32)
        launch_attention(8, 2, head_dim, 32, torch.bfloat16, everything)
        launch_attention(8, 2, head_dim, 32, torch.bfloat16, everything, torch.float8_e4m3fn)
    launch_attention(32, 8, 128, 16, torch.bfloat16, stored=torch.float8_e4m3fn)
    launch_attention(8, 2, 96, 16, torch.float16, AttentionVariant(window=4096))
    launch_attention(8, 2, 64, 16, torch.float16, everything, torch.int8)
    launch_attention(8, 2, 128, 16, torch.float32, everything, torch.int8)
    launch_attention(28, 4, 128, 16, torch.bfloat16)
    launch_attention(40, 8, 128, 16, torch.bfloat16, AttentionVariant(chunk=8192))
    for shape in latent_shapes():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            launch_latent_attention(shape, 16, dtype)
        launch_latent_attention(shape, 16, torch.bfloat16, torch.float8_e4m3fn)
    launch_all_sparse_latents()


def launch_all_sparse_latents() -> None:
    """Launch sparse latent attention with the sizes of every registered model that has it."""
    for shape in latent_shapes():
        if shape.num_index_heads:
            launch_sparse_latent_attention(shape, torch.bfloat16)
            launch_sparse_latent_attention(shape, torch.bfloat16, torch.float8_e4m3fn)


def launch_small_ops() -> None:
    """Launch norms, sums over ranks, activations, copies of blocks and updates of block tables."""
    x, weight = torch.zeros(3, 4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)
    norm.rms_norm(x, weight, 1e-5)
    norm.add_rms_norm(x, x, weight, 1e-5)
    launch_all_reduces()
    activation.silu_and_mul(x)
    activation.gelu_tanh_and_mul(x)
    activation.clamped_silu_and_mul(x, 1.702, 7.0)
    ids = torch.zeros(3, dtype=torch.int64)
    caches = torch.zeros(2, 4, 2, 2, 16, 64)
    paged_cache.copy_blocks(caches, ids, ids)
    paged_cache.copy_scattered_blocks(torch.zeros(3, 2, dtype=torch.int64), caches, caches)
    tables = torch.zeros(3, 64, dtype=torch.int32)
    block_tables.update_block_tables(tables, torch.zeros(5, 3, dtype=torch.int32))


def launch_all_reduces() -> None:
    """Launch sums of 2, 4 and 8 ranks, in one shot and in two, on two of the ranks: 6 variants."""
    x, weight = torch.zeros(3, 4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)
    buffer = torch.zeros(2, 8, 4096, dtype=torch.bfloat16)
    for size in (2, 4, 8):
        signals = [torch.zeros(size * NUM_SIGNALS, dtype=torch.int32)] * size
        for rank in (0, 1):
            peers = Peers(rank, [buffer] * size, signals)
            for two_shots_from in (1, 8):
                peers.two_shots_from = two_shots_from
                all_reduce_norm.all_reduce_add_rms_norm(x, x, weight, 1e-5, peers)


def launch_sampler() -> None:
    """Launch the sampling kernels for all rows, and for some rows with logits processors."""
    logits, ones, ids = torch.zeros(3, 32000), torch.ones(3), torch.zeros(3, dtype=torch.int64)
    keys = torch.zeros(3, 2, dtype=torch.int32)
    counts, words = torch.zeros(3, 32000, dtype=torch.int16), torch.zeros(3, 1000, dtype=torch.int32)
    biases = Biases(torch.zeros(4, dtype=torch.int32), torch.zeros(5, dtype=torch.int32), torch.ones(5))
    penalties = Penalties(ids, counts, words, torch.ones(3, 3))
    gumbel.random_keys(ids, ids)
    for rows, logits_processors in (
        (None, None),
        (ids, LogitsProcessors(32000, biases, penalties, Masks(ids, words))),
    ):
        sample_full.sample_greedy(logits, 0, rows, logits_processors)
        sample_full.sample_full(logits, ones, keys, 0, rows, logits_processors)
        sample_top_k_top_p.sample_top_k_top_p(
            logits, ones, ids, ones.double(), ones, keys, rows, logits_processors
        )
        topk_tokens.topk_tokens(logits, 128, ones, rows, logits_processors)
        topk_tokens.topk_tokens(logits, 20, None, rows, logits_processors)
        process_logits.process_logits(logits, ids, logits_processors)


def launch_quantized_linear(capability: int) -> None:
    """Launch few, some and many tokens with weights of 8 and 4 bits, and float8 if the GPU converts it."""
    for num_tokens in (3, 40, 300):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x, bias = torch.zeros(num_tokens, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
            groups, zeros = torch.zeros(32, 4096).half(), torch.zeros(32, 4096, dtype=torch.int16)
            index = torch.zeros(4096, dtype=torch.int32)
            int8 = torch.zeros(4096, 4096, dtype=torch.int8)
            int4 = torch.zeros(4096, 2048, dtype=torch.uint8)
            weights = [
                QuantizedWeight(int8, torch.zeros(1, 4096)),
                QuantizedWeight(int8, groups),
                QuantizedWeight(int4, groups, zeros),
                QuantizedWeight(int4, groups, zeros, index),
                QuantizedWeight(int4.view(FLOAT4), torch.zeros(128, 4096).bfloat16()),
            ]
            if capability >= FLOAT8_CAPABILITY:
                weights.append(QuantizedWeight(int8.to(torch.float8_e4m3fn), groups))
            for weight in weights:
                quantized_linear.quantized_linear(x, weight, bias)
    if capability >= FLOAT8_CAPABILITY:
        tokens = torch.zeros(3, 4096, dtype=torch.bfloat16)
        quantize_tokens.quantize_tokens(tokens)
        norm.add_rms_norm_float8(tokens, tokens, tokens[0], 1e-5)
        launch_all_float8_groups()


def launch_all_float8_groups() -> None:
    """Launch few, some and many tokens with weights in float8 whose groups are those of the tokens."""
    for num_tokens, out_features in ((3, 2112), (40, 4096), (300, 4096)):
        weight = QuantizedWeight(
            torch.zeros(out_features, 7168).to(torch.float8_e4m3fn), torch.zeros(56, out_features)
        )
        tokens = torch.zeros(num_tokens, 7168, dtype=torch.bfloat16)
        # The wrapper quantizes tokens by an op, which is none of a GPU here.
        float8_groups.float8_groups_linear(tokens, weight, tokens.new_zeros(out_features))


def launch_experts(capability: int) -> None:
    """Launch few, some and many tokens per expert with weights in full precision and quantized."""
    for num_tokens in (2, 100, 300):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            launch_expert_linears(num_tokens, ExpertWeights(torch.zeros(8, 256, 512, dtype=dtype)), dtype)
        int8, groups = torch.zeros(8, 256, 512, dtype=torch.int8), torch.zeros(8, 4, 256).half()
        int4, zeros = torch.zeros(8, 256, 256, dtype=torch.uint8), torch.zeros(8, 4, 256, dtype=torch.int16)
        weights = [
            ExpertWeights(int8, torch.zeros(8, 1, 256)),
            ExpertWeights(int4, groups, zeros),
            ExpertWeights(int4, groups, zeros, torch.zeros(8, 512, dtype=torch.int32)),
            ExpertWeights(
                int4.view(FLOAT4), torch.zeros(8, 16, 256).bfloat16(), bias=torch.zeros(8, 256).bfloat16()
            ),
        ]
        if capability >= FLOAT8_CAPABILITY:
            weights.append(ExpertWeights(int8.to(torch.float8_e4m3fn), torch.zeros(8, 1, 256)))
        for each in weights:
            launch_expert_linears(num_tokens, each, torch.bfloat16)


def launch_all_packed_weights() -> None:
    """Launch few and many tokens with weights in MXFP4, NVFP4 and int4, of linear layers and of experts."""
    codes = torch.zeros(8, 256, 512, dtype=torch.uint8)
    zeros = torch.zeros(8, 8, 256, dtype=torch.int16)
    for num_tokens in (3, 300):
        x = torch.zeros(num_tokens, 1024, dtype=torch.bfloat16)
        choices = moe.sort_choices(torch.zeros(num_tokens, 8, dtype=torch.int64), 8)
        for own, group_len, own_zeros in ((codes.view(FLOAT4), 32, None), (codes.view(FLOAT4), 16, None),
                                          (codes, 128, zeros)):  # fmt: skip
            scales = torch.zeros(8, 1024 // group_len, 256, dtype=torch.bfloat16)
            moe.scatter_linear(x, ExpertWeights(own, scales, own_zeros), choices)
            weight = QuantizedWeight(own[0], scales[0], None if own_zeros is None else own_zeros[0])
            quantized_linear.quantized_linear(x, weight)


def launch_routing() -> None:
    """Launch the choice of experts of every size that is tested."""
    for own in ROUTINGS:
        for correction in (None, torch.zeros(own.num_experts)):
            routing.select_experts(torch.zeros(3, own.num_experts), correction, own)


def launch_adapters() -> None:
    """Launch adapters of small and large ranks on a fused layer and on a layer of one part."""
    ids = torch.zeros(3, dtype=torch.int32)
    groups = LoraGroups(ids, ids, ids[:2])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for max_rank, part_lens in ((8, [4096, 1024, 1024]), (16, [4096]), (64, [4096]), (256, [4096])):
            factors = make_factors(2, max_rank, 4096, part_lens, dtype, torch.device("cpu"))
            x, y = torch.zeros(3, 4096, dtype=dtype), torch.zeros(3, sum(part_lens), dtype=dtype)
            lora.add_lora(y, x, factors, groups)


def launch_expert_linears(num_tokens: int, weights: ExpertWeights, dtype: torch.dtype) -> None:
    top_k, x = 2, torch.zeros(num_tokens, 512, dtype=dtype)
    choices = moe.sort_choices(torch.zeros(num_tokens, top_k, dtype=torch.int64), len(weights.codes))
    moe.scatter_linear(x, weights, choices)
    rows = x.repeat_interleave(top_k, dim=0)
    moe.gather_linear(rows, weights, choices, torch.zeros(num_tokens, top_k))


def launch_attention(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    variant: AttentionVariant = PLAIN,
    stored: torch.dtype | None = None,
) -> None:
    num_seqs, num_tokens = 16, 2048
    heads = torch.zeros(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    cache = torch.zeros(32, 2, num_kv_heads, block_size, head_dim, dtype=stored or dtype)
    scales = None if stored is None else torch.zeros(cache.shape[:-1])
    angles, weight = torch.zeros(num_tokens, head_dim, dtype=dtype), torch.zeros(head_dim, dtype=dtype)
    slots = torch.zeros(num_tokens, dtype=torch.int64)
    q = fused_qk_norm_rope_kv_write.fused_qk_norm_rope_kv_write(
        heads, cache, slots, angles, angles, kv_scales=scales
    )
    half = angles[:, : head_dim // 2]
    norm_weights = weight, weight, 1e-6
    fused_qk_norm_rope_kv_write.fused_qk_norm_rope_kv_write(
        heads, cache, slots, half, half, *norm_weights, kv_scales=scales
    )
    fused_qk_norm_rope_kv_write.fused_qk_norm_rope_kv_write(
        heads, cache, slots, None, None, *norm_weights, kv_scales=scales
    )
    if scales is not None:
        fused_qk_norm_rope_kv_write.fused_qk_norm_rope_kv_write(
            heads, cache, slots, angles, angles, kv_scales=scales, fixed_scales=scales[0, 0, 0, :2]
        )
    tables = torch.zeros(num_seqs, 32, dtype=torch.int32)
    lens = torch.full((num_seqs,), 32, dtype=torch.int32)
    for splits in (split_decodes(lens, 512), split_runs(lens, slots[:num_seqs].int(), MAX_RUN_ROWS)):
        paged_decode.paged_decode_attention(q[:num_seqs], cache, tables, lens, 0.1, splits, variant, scales)
    starts = torch.zeros(num_seqs + 1, dtype=torch.int32)
    for some in (q, q[: 2 * num_seqs]):
        paged_prefill.paged_prefill_attention(some, cache, tables, starts, lens, 0.1, variant, scales)


def launch_latent_attention(
    shape: LatentShape, num_heads: int, dtype: torch.dtype, stored: torch.dtype | None = None
) -> None:
    """Launch latent attention; chunks with a choice of visible tokens too if the model has an indexer."""
    num_seqs, num_tokens, block_size = 16, 512, 16
    rank, key_dim, shared_dim = shape.rank, shape.qk_nope_head_dim, shape.qk_rope_head_dim
    latents = torch.zeros(32, 1, 1, block_size, rank + shared_dim, dtype=stored or dtype)
    scales = None if stored is None else torch.zeros(latents.shape[:-1])
    q = torch.zeros(num_tokens, num_heads, key_dim + shared_dim, dtype=dtype)
    projected = torch.zeros(num_tokens, 1536 + rank + shared_dim, dtype=dtype)
    slots = torch.zeros(num_tokens, dtype=torch.int64)
    angles, weight = torch.zeros(num_tokens, shared_dim, dtype=dtype), torch.zeros(rank, dtype=dtype)
    for interleaved in (False, True):
        fused_latent_norm_rope_write.fused_latent_norm_rope_write(
            q, projected[:, 1536:], latents, slots, angles, angles, weight, 1e-6, interleaved, scales
        )
    tables = torch.zeros(num_seqs, 32, dtype=torch.int32)
    lens = torch.full((num_seqs,), 32, dtype=torch.int32)
    absorbed = torch.zeros(num_seqs, num_heads, rank + shared_dim, dtype=dtype)
    latent_decode.latent_decode_attention(
        absorbed, latents, tables, lens, 0.1, rank, split_decodes(lens, 512), scales
    )
    starts = torch.arange(num_seqs + 1, dtype=torch.int32) * 32
    expansion = Expansion.of(torch.zeros(num_heads, key_dim + shape.v_head_dim, rank, dtype=dtype), key_dim)
    bounds = ChunkBounds([32] * num_seqs, [32] * num_seqs)
    choices = [None, torch.ones(num_tokens, 512, dtype=torch.bool)] if shape.num_index_heads else [None]
    for visible in choices:
        latent_prefill.latent_prefill_attention(
            q, latents, tables, starts, lens, bounds, 0.1, expansion, scales, visible
        )


def launch_sparse_latent_attention(
    shape: LatentShape, dtype: torch.dtype, stored: torch.dtype | None = None
) -> None:
    """Launch the indexer and the attention to chosen tokens."""
    num_tokens, num_heads, block_size = 16, 128, 16
    rank, shared_dim, index_dim = shape.rank, shape.qk_rope_head_dim, shape.index_head_dim
    dim = rank + shared_dim
    rows = torch.zeros(256, 1, 1, block_size, dim + index_dim, dtype=stored or dtype)
    scales = None if stored is None else torch.zeros(rows.shape[:-1])
    q = torch.zeros(num_tokens, shape.num_index_heads, index_dim, dtype=dtype)
    weights = torch.zeros(num_tokens, shape.num_index_heads)
    tables, lens = torch.zeros(num_tokens, 200, dtype=torch.int32), torch.full((num_tokens,), 3000).int()
    sequences = torch.arange(num_tokens)
    for own in (slice(None), slice(1, None)):  # one variant for any part of the tokens
        index_scores.index_scores(
            q[own], weights[own], rows[..., dim:], tables, sequences[own], lens[own], 2048, scales
        )
    absorbed = torch.zeros(num_tokens, num_heads, dim, dtype=dtype)
    slots, counts = torch.zeros(num_tokens, 2048, dtype=torch.int32), lens.clamp(max=2048)
    sparse_latent.sparse_latent_attention(absorbed, rows[..., :dim], slots, counts, 0.1, rank, scales)
    projected = torch.zeros(num_tokens, 1536 + dim, dtype=dtype)
    keys = torch.zeros(num_tokens, index_dim, dtype=dtype)
    angles, weight = torch.zeros(num_tokens, shared_dim, dtype=dtype), torch.zeros(rank, dtype=dtype)
    queries = torch.zeros(num_tokens, num_heads, shape.qk_nope_head_dim + shared_dim, dtype=dtype)
    fused_latent_norm_rope_write.fused_latent_norm_rope_write(
        queries, projected[:, 1536:], rows, sequences, angles, angles, weight, 1e-6, True, scales, keys
    )


# Heads of values and of keys, elements of a key and of a value, a decay per channel, and the rule: Qwen3-Next, Kimi
# Linear, Nemotron-H, Bamba, MiniMax-Text-01.
_LINEAR_ATTENTION = (
    (32, 16, 128, 128, False, "delta"),
    (32, 32, 128, 128, True, "delta"),
    (128, 8, 128, 64, False, "rates"),
    (128, 1, 256, 64, False, "rates"),
    (64, 64, 128, 128, False, "sum"),
)


def launch_recurrences() -> None:
    """Launch the recurrences of layers that keep a state, for decode steps and prompts, with states of both types."""
    for num_tokens, state_dtype in itertools.product((1, 100), (torch.float32, torch.bfloat16)):
        bounds = torch.tensor([0, num_tokens], dtype=torch.int32)
        stores = torch.ones(1, dtype=torch.bool)
        runs = StateRuns(bounds[:1], bounds, torch.zeros(1, dtype=torch.bool), num_tokens, stores)
        for heads, key_heads, key_dim, value_dim, per_channel, rule in _LINEAR_ATTENTION:
            q, k = torch.zeros(2, num_tokens, key_heads, key_dim, dtype=torch.bfloat16)
            decay = torch.zeros(num_tokens, heads, *([key_dim] if per_channel else []))
            recurrence.linear_attention(
                q,
                k,
                torch.zeros(num_tokens, heads, value_dim, dtype=torch.bfloat16),
                decay,
                None if rule == "sum" else torch.zeros(num_tokens, heads),
                torch.zeros(1, heads, key_dim, value_dim, dtype=state_dtype),
                runs,
                delta=rule == "delta",
            )
        for width, silu in ((3, False), (7, False), (4, True)):
            x = torch.zeros(num_tokens, 2048, dtype=torch.bfloat16)
            weight, bias = x.new_zeros(2048, width), x.new_zeros(2048)
            for own in (bias, None):
                recurrence.causal_conv(x, weight, own, x.new_zeros(1, width - 1, 2048), runs, silu=silu)
        for num_states, dtype in ((16, torch.bfloat16), (1, torch.float32)):
            x, b = (
                torch.zeros(num_tokens, 2048, dtype=dtype),
                torch.zeros(num_tokens, num_states, dtype=dtype),
            )
            step, decay = torch.zeros(num_tokens, 2048), torch.zeros(num_states, 2048)
            states = torch.zeros(1, num_states, 2048, dtype=state_dtype)
            recurrence.selective_scan(x, step, decay, b, b, states, runs)
