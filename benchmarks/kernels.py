"""Measure the kernels on this machine's CPU, beside PyTorch's implementations of the same ops.

    python -m benchmarks.kernels --json benchmarks/results/kernels.json

`benchmarks.gpu` measures the kernels of a GPU. Each op and its peers take turns in one process; figures are medians.
`kernels.<op>.<shape>.us` is microseconds per call. `share_of_copy` is the op's necessary bytes per second over those
of a large copy in the same run, and `share_of_matmul` its operations per second over those of a large matmul; the one
that bounds the op is reported (Williams et al., *Roofline*, 2009). Weights and KV caches do not fit into the
processor's caches.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import Figure, make_parser, median, report
from benchmarks.kernel_peers import (
    compiled,
    geglu_by_torch,
    norm_by_torch,
    rotate_by_torch,
    swiglu_by_torch,
)
from quire.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from quire.kernels.fused_qk_norm_rope_kv_write import fused_qk_norm_rope_kv_write
from quire.kernels.gumbel import gumbel_noise
from quire.kernels.linear import PackedWeight, linear, pack, pack_int8
from quire.kernels.norm import add_rms_norm
from quire.kernels.paged_attention import paged_decode_attention, paged_prefill_attention
from quire.kernels.sampling import sample_full, sample_greedy
from quire.worker.comm.shared_memory import SharedMemoryCommunicator, join_group
from quire.worker.comm.torch_distributed import create_store

Op = Callable[[], object]

QUIRE = "quire"
ROTATED_BYTES = 96 << 20
LINEARS = [(3072, 512), (512, 1536), (32000, 512)]
NUM_TOKENS = [1, 4, 8, 16, 32, 64, 512]
# Numbers of tokens at which weights of 16 and 8 bits are faster than those of 32.
FEW_TOKENS = [1, 4]
DECODES = [(1, 256), (1, 2048), (8, 512), (64, 256)]
PREFILLS = [(0, 160), (0, 1024), (512, 32)]
BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 4, 64
HIDDEN_SIZE, INTERMEDIATE_SIZE, VOCAB_SIZE = 512, 1536, 32000
SCALE = HEAD_DIM**-0.5
ALL_REDUCE_BYTES = [4096, 16384, 65536, 1 << 20]
HOST = "127.0.0.1"
# OpenMP's threads spin for a few milliseconds after an op; the pause keeps them from slowing the next op.
PAUSE_S = 0.01
TURN_CALLS = 5


@dataclass(frozen=True, slots=True)
class Roof:
    """Limits of a machine, measured in the same process.

    Attributes:
        copy: bytes read and written per second.
        matmul: floating-point operations per second.
    """

    copy: float
    matmul: float

    def figures(self) -> dict[str, Figure]:
        return {
            "kernels.copy.gb_per_s": Figure(self.copy / 1e9, "GB/s"),
            "kernels.matmul.gflops": Figure(self.matmul / 1e9, "GFLOP/s"),
        }


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one shape.

    Attributes:
        name: ``kernels.<op>.<shape>``.
        num_bytes: bytes that the op must read and write.
        flops: floating-point operations; 0 if negligible beside the bytes.
        seconds: implementation |-> seconds per call; ours is `QUIRE`.
    """

    name: str
    num_bytes: int
    flops: int
    seconds: dict[str, float]

    def figures(self, roof: Roof) -> dict[str, Figure]:
        """Return the microseconds of all implementations, and the share of the roof that ours reaches."""
        own = self.seconds[QUIRE]
        if self.flops * roof.copy > self.num_bytes * roof.matmul:
            bound, share = "matmul", self.flops / own / roof.matmul
        else:
            bound, share = "copy", self.num_bytes / own / roof.copy
        figures = {f"{self.name}.us": Figure(1e6 * own, "us")}
        figures[f"{self.name}.share_of_{bound}"] = Figure(share, "")
        for peer, seconds in self.seconds.items():
            if peer != QUIRE:
                figures[f"{self.name}.{peer}_us"] = Figure(1e6 * seconds, "us")
        return figures


def time_in_turns(ops: dict[str, Op], repetitions: int) -> dict[str, float]:
    """Return the median seconds per call of each op."""
    seconds: dict[str, list[float]] = {name: [] for name in ops}
    for _ in range(-(-repetitions // TURN_CALLS)):
        for name, op in ops.items():
            time.sleep(PAUSE_S)
            op()
            for _ in range(TURN_CALLS):
                started = time.perf_counter()
                op()
                seconds[name].append(time.perf_counter() - started)
    return {name: median(values) for name, values in seconds.items()}


def measure_roof(repetitions: int) -> Roof:
    source = torch.randn(ROTATED_BYTES // 4)
    target, square = torch.empty_like(source), torch.randn(2048, 2048)
    ops: dict[str, Op] = {"copy": lambda: target.copy_(source), "matmul": lambda: square @ square}
    seconds = time_in_turns(ops, repetitions)
    return Roof(2 * source.nbytes / seconds["copy"], 2 * len(square) ** 3 / seconds["matmul"])


def in_turn(op: Callable[..., object], items: Sequence[object], *arguments: object) -> Op:
    """Return a function that calls the op with the next item each time."""
    turn = itertools.cycle(items)
    return lambda: op(next(turn), *arguments)


def multiply(weight: PackedWeight, x: Tensor) -> Tensor:
    return linear(x, weight)


def multiply_plain(weight: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, weight)


def linears(repetitions: int) -> list[Case]:
    cases = []
    for out_features, in_features in LINEARS:
        numbers = out_features * in_features
        plain = [
            torch.randn(out_features, in_features) for _ in range(max(2, ROTATED_BYTES // (4 * numbers)))
        ]
        packed = [pack(weight) for weight in plain]
        shape = f"{out_features}x{in_features}"
        for num_tokens in NUM_TOKENS:
            x = torch.randn(num_tokens, in_features)
            ops = {QUIRE: in_turn(multiply, packed, x), "f_linear": in_turn(multiply_plain, plain, x)}
            seconds = time_in_turns(ops, repetitions)
            name = f"kernels.linear.{shape}_t{num_tokens}"
            cases.append(Case(name, 4 * numbers, 2 * numbers * num_tokens, seconds))
        rounded = [weight.bfloat16() for weight in plain]
        cases += narrow_linears(
            "bf16", 2 * numbers, [pack(weight) for weight in rounded], rounded, repetitions
        )
        codes = [torch.randint(-128, 128, weight.shape, dtype=torch.int8) for weight in plain]
        coded = [pack_int8(code, torch.ones(out_features)) for code in codes]
        packed_weights = [weight for weight in coded if weight is not None]
        if packed_weights:
            cases += narrow_linears("int8", numbers, packed_weights, plain, repetitions)
    return cases


def narrow_linears(
    kind: str, num_bytes: int, packed: list[PackedWeight], plain: list[Tensor], repetitions: int
) -> list[Case]:
    """Measure weights of fewer bits, beside F.linear on the same weights in the dtype of `plain`."""
    cases = []
    out_features, in_features = plain[0].shape
    for num_tokens in FEW_TOKENS:
        x = torch.randn(num_tokens, in_features).to(plain[0].dtype)
        ops = {QUIRE: in_turn(multiply, packed, x), "f_linear": in_turn(multiply_plain, plain, x)}
        name = f"kernels.linear_{kind}.{out_features}x{in_features}_t{num_tokens}"
        flops = 2 * out_features * in_features * num_tokens
        cases.append(Case(name, num_bytes, flops, time_in_turns(ops, repetitions)))
    return cases


def make_cache(num_seqs: int, seq_len: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return caches to use in turn, shuffled block tables, and lengths."""
    width = -(-seq_len // BLOCK_SIZE)
    shape = num_seqs * width + 1, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM
    num_bytes = 4 * torch.Size(shape).numel()
    caches = [torch.randn(shape) for _ in range(max(2, min(16, ROTATED_BYTES // num_bytes)))]
    tables = (torch.randperm(num_seqs * width) + 1).view(num_seqs, width).int()
    return caches, tables, torch.full((num_seqs,), seq_len, dtype=torch.int32)


def gathered(kv_cache: Tensor, tables: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Gather keys and values for PyTorch's attention, each [S, Hkv, L, D]."""
    blocks = kv_cache[tables.long()].permute(2, 0, 3, 1, 4, 5)
    keys, values = blocks.reshape(2, len(tables), NUM_KV_HEADS, -1, HEAD_DIM)[..., :seq_len, :]
    return keys, values


def decode(kv_cache: Tensor, q: Tensor, tables: Tensor, lens: Tensor) -> Tensor:
    return paged_decode_attention(q, kv_cache, tables, lens, SCALE)


def decode_by_sdpa(kv_cache: Tensor, q: Tensor, tables: Tensor, seq_len: int) -> Tensor:
    grouped = q.view(len(q), NUM_KV_HEADS, -1, HEAD_DIM)
    return F.scaled_dot_product_attention(grouped, *gathered(kv_cache, tables, seq_len), scale=SCALE)


def decodes(repetitions: int) -> list[Case]:
    cases = []
    for num_seqs, seq_len in DECODES:
        caches, tables, lens = make_cache(num_seqs, seq_len)
        q = torch.randn(num_seqs, NUM_HEADS, HEAD_DIM)
        ops = {
            QUIRE: in_turn(decode, caches, q, tables, lens),
            "gather_sdpa": in_turn(decode_by_sdpa, caches, q, tables, seq_len),
        }
        keys = num_seqs * seq_len * HEAD_DIM
        name = f"kernels.paged_decode.s{num_seqs}_l{seq_len}"
        seconds = time_in_turns(ops, repetitions)
        cases.append(Case(name, 8 * keys * NUM_KV_HEADS, 4 * keys * NUM_HEADS, seconds))
    return cases


def prefill(kv_cache: Tensor, q: Tensor, tables: Tensor, starts: Tensor, lens: Tensor) -> Tensor:
    return paged_prefill_attention(q, kv_cache, tables, starts, lens, SCALE)


def prefill_by_sdpa(kv_cache: Tensor, q: Tensor, tables: Tensor, mask: Tensor) -> Tensor:
    keys, values = (
        x.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1)
        for x in gathered(kv_cache, tables, mask.shape[1])
    )
    return F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, mask, scale=SCALE)


def prefills(repetitions: int) -> list[Case]:
    cases = []
    for cached_len, chunk_len in PREFILLS:
        caches, tables, lens = make_cache(1, cached_len + chunk_len)
        q = torch.randn(chunk_len, NUM_HEADS, HEAD_DIM)
        starts = torch.tensor([0, chunk_len], dtype=torch.int32)
        mask = torch.ones(chunk_len, cached_len + chunk_len, dtype=torch.bool).tril(cached_len)
        ops = {
            QUIRE: in_turn(prefill, caches, q, tables, starts, lens),
            "gather_sdpa": in_turn(prefill_by_sdpa, caches, q, tables, mask),
        }
        name = f"kernels.paged_prefill.p{cached_len}_c{chunk_len}"
        num_bytes = 8 * (q.numel() + (cached_len + chunk_len) * NUM_KV_HEADS * HEAD_DIM)
        flops = 4 * int(mask.sum()) * NUM_HEADS * HEAD_DIM
        cases.append(Case(name, num_bytes, flops, time_in_turns(ops, repetitions)))
    return cases


def sample_by_torch(logits: Tensor, temperature: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    return (logits / temperature.unsqueeze(1) + gumbel_noise(keys, ids)).argmax(dim=1)


def small_ops(repetitions: int) -> list[Case]:
    cases = []
    for num_tokens in (1, 64, 1024):
        x, residual = torch.randn(num_tokens, HIDDEN_SIZE), torch.zeros(num_tokens, HIDDEN_SIZE)
        norm = x, residual, torch.ones(HIDDEN_SIZE), 1e-5
        gate_up = (torch.randn(num_tokens, 2 * INTERMEDIATE_SIZE),)
        gate_bytes = 3 * gate_up[0].nbytes // 2
        heads = make_heads(num_tokens)
        heads_bytes = 2 * heads[0].nbytes + 2 * heads[-1].nbytes
        rows: list[tuple[str, int, Callable[..., Tensor], Callable[..., Tensor], tuple[object, ...]]] = [
            ("add_rms_norm", 4 * x.nbytes, add_rms_norm, norm_by_torch, norm),
            ("silu_and_mul", gate_bytes, silu_and_mul, swiglu_by_torch, gate_up),
            ("gelu_tanh_and_mul", gate_bytes, gelu_tanh_and_mul, geglu_by_torch, gate_up),
            ("fused_qk_norm_rope_kv_write", heads_bytes, fused_qk_norm_rope_kv_write, rotate_by_torch, heads),
        ]
        for op, num_bytes, ours, peer, arguments in rows:
            ops: dict[str, Op] = {
                QUIRE: partial(ours, *arguments),
                "torch": partial(peer, *arguments),
                "torch_compile": partial(compiled(peer), *arguments),
            }
            seconds = time_in_turns(ops, 10 * repetitions)
            cases.append(Case(f"kernels.{op}.t{num_tokens}", num_bytes, 0, seconds))
    return cases + samplers(repetitions)


def make_heads(num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return arguments of fused_qk_norm_rope_kv_write: heads, a cache, shuffled slots, cosines and sines."""
    heads = torch.randn(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
    (cache, *_), tables, _ = make_cache(1, num_tokens)
    slots = (tables.long().view(-1, 1) * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).view(-1)[:num_tokens]
    angles = torch.randn(num_tokens, HEAD_DIM // 2)
    cos, sin = angles.cos(), angles.sin()
    return heads, cache, slots, torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)


def samplers(repetitions: int) -> list[Case]:
    cases = []
    ids = torch.arange(VOCAB_SIZE, dtype=torch.int32).unsqueeze(0)
    for num_rows in (1, 64):
        logits, ones = torch.randn(num_rows, VOCAB_SIZE), torch.ones(num_rows)
        keys = torch.randint(-(2**31), 2**31, (num_rows, 2), dtype=torch.int32)
        greedy: dict[str, Op] = {
            QUIRE: partial(sample_greedy, logits),
            "torch": partial(logits.max, dim=1),
        }
        full: dict[str, Op] = {
            QUIRE: partial(sample_full, logits, ones, keys),
            "torch": partial(sample_by_torch, logits, ones, keys, ids),
        }
        for op, ops in (("sample_greedy", greedy), ("sample_full", full)):
            name = f"kernels.{op}.n{num_rows}"
            cases.append(Case(name, logits.nbytes, 0, time_in_turns(ops, repetitions)))
    return cases


def all_reduces(repetitions: int) -> dict[str, Figure]:
    """Measure all-reduce between this process and a child, one thread each."""
    store, port = create_store(HOST)
    join_in = f"from benchmarks.kernels import run_peer; run_peer({port}, {repetitions})"
    child = subprocess.Popen([sys.executable, "-c", join_in])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = reduce_in_turns(0, port, repetitions)
    finally:
        torch.set_num_threads(threads)
        child.wait(60)
    del store
    return {
        f"kernels.all_reduce.{num_bytes}b.{'us' if name == QUIRE else f'{name}_us'}": Figure(
            1e6 * value, "us"
        )
        for num_bytes, values in seconds.items()
        for name, value in values.items()
    }


def run_peer(port: int, repetitions: int) -> None:
    torch.set_num_threads(1)
    with torch.inference_mode():
        reduce_in_turns(1, port, repetitions)


def reduce_in_turns(rank: int, port: int, repetitions: int) -> dict[int, dict[str, float]]:
    """Return median seconds over shared memory and gloo: bytes |-> transport |-> seconds."""
    comm = join_group(rank, 2, HOST, port, torch.device("cpu"), 60)
    if not isinstance(comm, SharedMemoryCommunicator):
        return {}
    seconds = {}
    for num_bytes in ALL_REDUCE_BYTES:
        data = torch.zeros(num_bytes // 4)
        ops: dict[str, Op] = {
            QUIRE: partial(comm.all_reduce, data),
            "gloo": partial(comm.group.all_reduce, data),
        }
        seconds[num_bytes] = time_in_turns(ops, 10 * repetitions)
    comm.close()
    return seconds


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=20, help="of each op (default: %(default)s)")
    arguments = parser.parse_args()
    repetitions = arguments.repetitions
    torch.manual_seed(0)
    with torch.inference_mode():
        roof = measure_roof(repetitions)
        cases = [
            *linears(repetitions),
            *decodes(repetitions),
            *prefills(repetitions),
            *small_ops(repetitions),
        ]
        figures = roof.figures() | {k: v for case in cases for k, v in case.figures(roof).items()}
        figures |= all_reduces(repetitions)
    note = f"CPU, {torch.get_num_threads()} threads; no GPU figures"
    report({name: Figure(f.value, f.unit, note) for name, f in figures.items()}, arguments.json)


if __name__ == "__main__":
    main()
