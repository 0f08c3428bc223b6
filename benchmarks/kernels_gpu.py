"""The Triton kernels against what the same GPU can copy and multiply, measured in the same process.

    python -m benchmarks.kernels_gpu --json FILE

Figures: kernels.<op>.<shape>.us, and .share_of_copy or .share_of_matmul: the bytes that the op must move, or the
operations that it must do, a second, as a share of those of a large copy or matmul. Prefill stands beside torch's
scaled_dot_product_attention on keys and values that are not paged.

Needs a CUDA GPU and Triton; exits with status 2 without.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation import silu_and_mul
from quire.kernels.decode_splits import split_decodes
from quire.kernels.norm import add_rms_norm
from quire.kernels.paged_attention import paged_decode_attention, paged_prefill_attention
from quire.kernels.rotate_and_store import rotate_and_store
from quire.kernels.sampling import draw_from_all, draw_from_kept

from .common import Figure, parser, report

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


@dataclass(frozen=True, slots=True)
class Roof:
    """What the GPU reached.

    Attributes:
        copy: bytes read and written a second.
        matmul: floating-point operations a second.
    """

    copy: float
    matmul: float


def seconds(op: Callable[[], object]) -> float:
    """Median time of one call, the second-level cache flushed between calls."""
    from triton.testing import do_bench

    return float(do_bench(op, warmup=25, rep=200, return_mode="median")) / 1e3


def measure_roof() -> Roof:
    source = torch.empty(COPY_BYTES // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = (random(MATMUL_LEN, MATMUL_LEN) for _ in "ab")
    return Roof(
        COPY_BYTES / seconds(lambda: target.copy_(source)), 2 * MATMUL_LEN**3 / seconds(lambda: a @ b)
    )


def moving(name: str, num_bytes: int, op: Callable[[], object], roof: Roof) -> dict[str, Figure]:
    """Figures of an op that memory bounds."""
    time = seconds(op)
    rate = num_bytes / time
    return {
        f"{name}.us": Figure(1e6 * time, "us", f"{rate / 1e9:.0f} GB/s"),
        f"{name}.share_of_copy": Figure(rate / roof.copy, "ratio"),
    }


def decode_figures(roof: Roof) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for num_seqs, seq_len in DECODE_SHAPES:
        cache, tables = random_cache(num_seqs, seq_len)
        q = random(num_seqs, NUM_HEADS, HEAD_DIM)
        lens = torch.full((num_seqs,), seq_len, dtype=torch.int32, device="cuda")
        splits = split_decodes(lens, seq_len)
        num_bytes = 2 * num_seqs * seq_len * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
        op = partial(paged_decode_attention, q, cache, tables, lens, HEAD_DIM**-0.5, splits)
        figures |= moving(f"kernels.decode.{num_seqs}x{seq_len}", num_bytes, op, roof)
    return figures


def prefill_figures(roof: Roof) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for length in PREFILL_LENS:
        cache, tables = random_cache(1, length)
        q, k, v = (random(length, heads, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
        starts = torch.tensor([0, length], dtype=torch.int32, device="cuda")
        packed = tuple(x.transpose(0, 1).unsqueeze(0).contiguous() for x in (q, k, v))
        own = seconds(partial(paged_prefill_attention, q, cache, tables, starts, starts[1:], HEAD_DIM**-0.5))
        sdpa = seconds(partial(F.scaled_dot_product_attention, *packed, is_causal=True, enable_gqa=True))
        flops = 2 * length * (length + 1) * NUM_HEADS * HEAD_DIM
        name = f"kernels.prefill.{length}"
        figures[f"{name}.us"] = Figure(1e6 * own, "us", f"{flops / own / 1e12:.0f} TFLOP/s")
        figures[f"{name}.share_of_matmul"] = Figure(flops / own / roof.matmul, "ratio")
        figures[f"{name}.sdpa_us"] = Figure(1e6 * sdpa, "us", f"{flops / sdpa / 1e12:.0f} TFLOP/s")
    return figures


def elementwise_figures(roof: Roof) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for num_tokens in NUM_TOKENS:
        x, residual = random(num_tokens, HIDDEN_SIZE), random(num_tokens, HIDDEN_SIZE)
        weight, gate_up = random(HIDDEN_SIZE), random(num_tokens, 2 * INTERMEDIATE_SIZE)
        heads = random(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
        angles = random(num_tokens, HEAD_DIM)
        cache, tables = random_cache(1, num_tokens)
        slots = (tables.long().view(-1, 1) * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device="cuda")).view(-1)
        ops: dict[str, tuple[int, Callable[[], object]]] = {
            "add_rms_norm": (4 * x.nbytes, partial(add_rms_norm, x, residual, weight, 1e-5)),
            "silu_and_mul": (3 * gate_up.nbytes // 2, partial(silu_and_mul, gate_up)),
            "rotate_and_store": (
                2 * heads.nbytes + 2 * angles.nbytes,
                partial(rotate_and_store, heads, cache, slots, angles, angles),
            ),
        }
        for name, (num_bytes, op) in ops.items():
            figures |= moving(f"kernels.{name}.{num_tokens}", num_bytes, op, roof)
    return figures


def sampling_figures(roof: Roof) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for num_rows in NUM_SAMPLED:
        logits = torch.randn(num_rows, VOCAB_SIZE, device="cuda")
        temperature = torch.ones(num_rows, device="cuda")
        keys = torch.zeros(num_rows, 2, dtype=torch.int32, device="cuda")
        top_k = torch.full((num_rows,), 50, device="cuda")
        top_p, min_p = 0.9 * temperature.double(), 0 * temperature
        draw = partial(draw_from_all, logits, temperature, keys)
        figures |= moving(f"kernels.draw_from_all.{num_rows}", logits.nbytes, draw, roof)
        kept = seconds(partial(draw_from_kept, logits, temperature, top_k, top_p, min_p, keys))
        figures[f"kernels.draw_from_kept.{num_rows}.us"] = Figure(1e6 * kept, "us", "top_k 50, top_p 0.9")
    return figures


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda")


def random_cache(num_seqs: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """A cache in shuffled blocks, and its tables."""
    num_blocks = num_seqs * -(-seq_len // BLOCK_SIZE)
    cache = random(num_blocks + 1, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    return cache, (torch.randperm(num_blocks, device="cuda") + 1).int().view(num_seqs, -1)


def main() -> int:
    arguments = parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        print(
            "benchmarks.kernels_gpu: this machine has no CUDA GPU, so there is nothing to measure",
            file=sys.stderr,
        )
        return 2
    torch.manual_seed(0)
    with torch.inference_mode():
        roof = measure_roof()
        note = torch.cuda.get_device_name()
        figures = {
            "kernels.copy.bytes_per_s": Figure(roof.copy, "bytes/s", note),
            "kernels.matmul.flops_per_s": Figure(
                roof.matmul, "FLOP/s", f"{note}, {MATMUL_LEN} cubed, bfloat16"
            ),
        }
        for measure in (decode_figures, prefill_figures, elementwise_figures, sampling_figures):
            figures |= measure(roof)
    report(figures, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
