"""GPU cases of `benchmarks.kernels`: the Triton kernels, at the shapes of Llama-3-8B in bfloat16.

The peers of attention are scaled_dot_product_attention on contiguous keys and values and, for prefill, FlexAttention;
the peer of small ops is torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.kernel_peers import norm_by_torch, swiglu_by_torch
from benchmarks.roofline import QUIRE, Case, Roof
from quire.kernels.activation import silu_and_mul
from quire.kernels.decode_splits import split_decodes
from quire.kernels.fused_qk_norm_rope_kv_write import fused_qk_norm_rope_kv_write
from quire.kernels.logits import Biases, LogitsProcessors, Masks, Penalties
from quire.kernels.norm import add_rms_norm, add_rms_norm_float8
from quire.kernels.paged_attention import paged_decode_attention, paged_prefill_attention
from quire.kernels.sampling import sample_full, sample_greedy, sample_top_k_top_p, topk_tokens

Op = Callable[[], object]

DTYPE = torch.bfloat16
COPY_BYTES = 2 << 30
MATMUL_LEN = 8192
BLOCK_SIZE = 16
# Query heads, KV heads and head_dim of Llama-3-8B; its hidden, intermediate and vocabulary sizes.
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
HIDDEN_SIZE, INTERMEDIATE_SIZE, VOCAB_SIZE = 4096, 14336, 128256

# (sequences, tokens of each)
DECODE_SHAPES = [(1, 1024), (1, 65536), (64, 1024), (64, 4096), (256, 1024)]
PREFILL_LENS = [512, 2048, 8192]
NUM_TOKENS = [64, 8192]
NUM_SAMPLED = [1, 64]


def measure() -> tuple[str, Roof, list[Case]]:
    """Return the machine, its roof, and all cases."""
    cases = [*decodes(), *prefills(), *small_ops(), *samplers()]
    return torch.cuda.get_device_name(), measure_roof(), cases


def seconds(op: Callable[[], object]) -> float:
    """Return the median seconds per call; the L2 cache is flushed between calls."""
    from triton.testing import do_bench

    return float(do_bench(op, warmup=25, rep=200, return_mode="median")) / 1e3


def measure_roof() -> Roof:
    source = torch.empty(COPY_BYTES // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = (random(MATMUL_LEN, MATMUL_LEN) for _ in "ab")
    return Roof(
        COPY_BYTES / seconds(lambda: target.copy_(source)), 2 * MATMUL_LEN**3 / seconds(lambda: a @ b)
    )


def decodes() -> list[Case]:
    cases = []
    for num_seqs, seq_len in DECODE_SHAPES:
        cache, tables = random_cache(num_seqs, seq_len)
        q = random(num_seqs, NUM_HEADS, HEAD_DIM)
        keys, values = (random(num_seqs, NUM_KV_HEADS, seq_len, HEAD_DIM) for _ in "kv")
        lens = torch.full((num_seqs,), seq_len, dtype=torch.int32, device="cuda")
        splits = split_decodes(lens, seq_len)
        own = partial(paged_decode_attention, q, cache, tables, lens, HEAD_DIM**-0.5, splits)
        sdpa = partial(F.scaled_dot_product_attention, q.unsqueeze(2), keys, values, enable_gqa=True)
        numbers = num_seqs * seq_len * HEAD_DIM
        num_bytes, flops = 2 * numbers * NUM_KV_HEADS * DTYPE.itemsize, 4 * numbers * NUM_HEADS
        cases.append(case(f"decode.{num_seqs}x{seq_len}", num_bytes, flops, own, sdpa=sdpa))
    return cases


def prefills() -> list[Case]:
    cases = []
    flex = torch.compile(flex_attention)
    for length in PREFILL_LENS:
        cache, tables = random_cache(1, length)
        q, k, v = (random(length, heads, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
        starts = torch.tensor([0, length], dtype=torch.int32, device="cuda")
        packed_q, packed_k, packed_v = (x.transpose(0, 1).unsqueeze(0).contiguous() for x in (q, k, v))
        packed = packed_q, packed_k, packed_v
        mask = create_block_mask(lambda b, h, query, key: query >= key, None, None, length, length)
        cases.append(
            case(
                f"prefill.{length}",
                2 * (q.nbytes + k.nbytes),
                2 * length * (length + 1) * NUM_HEADS * HEAD_DIM,
                partial(paged_prefill_attention, q, cache, tables, starts, starts[1:], HEAD_DIM**-0.5),
                sdpa=partial(F.scaled_dot_product_attention, *packed, is_causal=True, enable_gqa=True),
                flex=partial(flex, *packed, block_mask=mask, enable_gqa=True),
            )
        )
    return cases


def small_ops() -> list[Case]:
    cases = []
    norm, swiglu = torch.compile(norm_by_torch), torch.compile(swiglu_by_torch)
    own: Op
    for num_tokens in NUM_TOKENS:
        x, residual = random(num_tokens, HIDDEN_SIZE), random(num_tokens, HIDDEN_SIZE)
        weight, gate_up = random(HIDDEN_SIZE), random(num_tokens, 2 * INTERMEDIATE_SIZE)
        heads = random(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
        angles = random(num_tokens, HEAD_DIM)
        cache, tables = random_cache(1, num_tokens)
        slots = (tables.long().view(-1, 1) * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device="cuda")).view(-1)
        own = partial(add_rms_norm, x, residual, weight, 1e-5)
        compiled = partial(norm, x, residual, weight)
        cases.append(case(f"add_rms_norm.{num_tokens}", 4 * x.nbytes, 0, own, torch_compile=compiled))
        own = partial(add_rms_norm_float8, x, residual, weight, 1e-5)
        cases.append(case(f"add_rms_norm_float8.{num_tokens}", 7 * x.nbytes // 2, 0, own))
        own, compiled = partial(silu_and_mul, gate_up), partial(swiglu, gate_up)
        num_bytes = 3 * gate_up.nbytes // 2
        cases.append(case(f"silu_and_mul.{num_tokens}", num_bytes, 0, own, torch_compile=compiled))
        own = partial(fused_qk_norm_rope_kv_write, heads, cache, slots, angles, angles)
        cases.append(
            case(f"fused_qk_norm_rope_kv_write.{num_tokens}", 2 * heads.nbytes + 2 * angles.nbytes, 0, own)
        )
    return cases


def samplers() -> list[Case]:
    """Measure sampling, beside torch's equivalent if there is one; bytes are those of one pass over the logits.

    sample_top_k_top_p truncates by top_k 50 and top_p 0.9, or by top_p 0.9 alone. Rows with logits processors have
    masks, penalties and biases.
    """
    cases = []
    for num_rows in NUM_SAMPLED:
        logits = 3 * torch.randn(num_rows, VOCAB_SIZE, device="cuda")
        ones = torch.ones(num_rows, device="cuda")
        top_p, no_min_p = 0.9 * ones.double(), 0 * ones
        top_k = torch.full((num_rows,), 50, device="cuda")
        keys = torch.arange(2 * num_rows, dtype=torch.int32, device="cuda").view(-1, 2)
        logits_processors = random_logits_processors(num_rows)
        full = partial(sample_full, logits, ones, keys)
        kept = partial(sample_top_k_top_p, logits, ones, top_k, top_p, no_min_p, keys)
        nucleus = partial(sample_top_k_top_p, logits, ones, VOCAB_SIZE + 0 * top_k, top_p, no_min_p, keys)
        num_bytes = logits.nbytes
        num_more = logits_processors.penalties.counts.nbytes + 2 * logits_processors.masks.words.nbytes
        greedy, multinomial = partial(logits.max, dim=-1), partial(sample_by_torch, logits)
        cases += [
            case(f"sample_greedy.{num_rows}", num_bytes, 0, partial(sample_greedy, logits), torch=greedy),
            case(f"sample_full.{num_rows}", num_bytes, 0, full, torch=multinomial),
            case(
                f"sample_full.apply_logits_processors.{num_rows}",
                num_bytes + num_more,
                0,
                partial(full, logits_processors=logits_processors),
            ),
            case(f"sample_top_k_top_p.{num_rows}", num_bytes, 0, kept),
            case(f"sample_top_k_top_p.nucleus.{num_rows}", num_bytes, 0, nucleus),
            case(
                f"topk_tokens.{num_rows}",
                num_bytes,
                0,
                partial(topk_tokens, logits, 20),
                torch=partial(logits.topk, 20),
            ),
        ]
    return cases


def sample_by_torch(logits: Tensor) -> Tensor:
    return logits.softmax(dim=-1).multinomial(1)


def random_logits_processors(num_rows: int) -> LogitsProcessors:
    """Return a mask of half the vocabulary, penalties and ten biases for every row."""
    device, rows = "cuda", torch.arange(num_rows, device="cuda")
    counts = torch.randint(0, 2, (num_rows, VOCAB_SIZE), dtype=torch.int16, device=device)
    words = torch.randint(-(2**31), 2**31, (num_rows, VOCAB_SIZE // 32), dtype=torch.int32, device=device)
    columns = torch.randint(VOCAB_SIZE, (num_rows, 10), dtype=torch.int32, device=device).sort(dim=1).values
    starts = 10 * torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    return LogitsProcessors(
        VOCAB_SIZE,
        Biases(starts, columns.flatten(), torch.ones(10 * num_rows, device=device)),
        Penalties(rows, counts, words, torch.full((num_rows, 3), 1.1, device=device)),
        Masks(rows, words),
    )


def case(name: str, num_bytes: int, flops: int, own: Op, **peers: Op) -> Case:
    times = {QUIRE: seconds(own)} | {peer: seconds(op) for peer, op in peers.items()}
    return Case(f"kernels.{name}", num_bytes, flops, times)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda")


def random_cache(num_seqs: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Return a cache in shuffled blocks, and its block tables."""
    num_blocks = num_seqs * -(-seq_len // BLOCK_SIZE)
    cache = random(num_blocks + 1, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    return cache, (torch.randperm(num_blocks, device="cuda") + 1).int().view(num_seqs, -1)
