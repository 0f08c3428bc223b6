"""What the kernels cost on this machine's CPU, beside what PyTorch has for the same work.

    python -m benchmarks.kernels --json benchmarks/results/kernels.json

Each op and its peers take turns in one process; figures are medians. `us` is microseconds a call, with
`share_of_copy` the op's bytes a second over those of a copy of memory timed in the same run, and `share_of_matmul`
its operations over those of a large matmul. Weights and caches rotate through more memory than the processor caches.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import Figure, median, parser, report
from quire.kernels.activation import silu_and_mul
from quire.kernels.linear import linear, pack
from quire.kernels.norm import add_rms_norm
from quire.kernels.paged_attention import paged_decode_attention, paged_prefill_attention
from quire.worker.parallel import open_store
from quire.worker.shared_memory import SharedMemory, join

Op = Callable[[], object]

ROTATED_BYTES = 96 << 20
LINEARS = [(3072, 512), (512, 1536), (32000, 512)]
NUM_TOKENS = [1, 4, 8, 16, 32, 64, 512]
DECODES = [(1, 256), (1, 2048), (8, 512), (64, 256)]
PREFILLS = [(0, 160), (0, 1024), (512, 32)]
BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 4, 64
SCALE = HEAD_DIM**-0.5
ALL_REDUCE_BYTES = [4096, 16384, 65536, 1 << 20]
HOST = "127.0.0.1"


def time_in_turns(ops: dict[str, Op], repetitions: int) -> dict[str, float]:
    """Median seconds of each op."""
    seconds: dict[str, list[float]] = {name: [] for name in ops}
    for repetition in range(repetitions + 2):
        for name, op in ops.items():
            started = time.perf_counter()
            op()
            if repetition >= 2:
                seconds[name].append(time.perf_counter() - started)
    return {name: median(values) for name, values in seconds.items()}


class Machine:
    """What this machine's memory and cores can do, measured now.

    Attributes:
        copied_bytes_per_s: read and written.
        flops: of a float32 matmul.
    """

    def __init__(self, repetitions: int) -> None:
        source = torch.randn(ROTATED_BYTES // 4)
        target, square = torch.empty_like(source), torch.randn(2048, 2048)
        seconds = time_in_turns(
            {"copy": lambda: target.copy_(source), "matmul": lambda: square @ square}, repetitions
        )
        self.copied_bytes_per_s = 2 * source.nbytes / seconds["copy"]
        self.flops = 2 * len(square) ** 3 / seconds["matmul"]

    def figures(self) -> dict[str, Figure]:
        return {
            "kernels.copy.gb_per_s": Figure(self.copied_bytes_per_s / 1e9, "GB/s"),
            "kernels.matmul.gflops": Figure(self.flops / 1e9, "GFLOP/s"),
        }


def op_figures(name: str, seconds: dict[str, float]) -> dict[str, Figure]:
    """Microseconds of the op, `quire` in `seconds`, and of its peers."""
    figures = {f"{name}.us": Figure(1e6 * seconds["quire"], "us")}
    for peer, value in seconds.items():
        if peer != "quire":
            figures[f"{name}.{peer}_us"] = Figure(1e6 * value, "us")
    return figures


def in_turn(op: Callable[..., object], items: Sequence[object], *arguments: object) -> Op:
    """Calls the op with the next item each time."""
    turn = itertools.cycle(items)
    return lambda: op(next(turn), *arguments)


def linears(machine: Machine, repetitions: int) -> dict[str, Figure]:
    figures = {}
    for out_features, in_features in LINEARS:
        num_bytes = 4 * out_features * in_features
        plain = [torch.randn(out_features, in_features) for _ in range(max(2, ROTATED_BYTES // num_bytes))]
        packed = [pack(weight) for weight in plain]
        for num_tokens in NUM_TOKENS:
            x = torch.randn(num_tokens, in_features)
            seconds = time_in_turns(
                {
                    "quire": in_turn(lambda weight, x: linear(x, weight), packed, x),
                    "f_linear": in_turn(lambda weight, x: F.linear(x, weight), plain, x),
                },
                repetitions,
            )
            name = f"kernels.linear.{out_features}x{in_features}_t{num_tokens}"
            figures |= op_figures(name, seconds)
            if num_tokens <= 8:
                share = num_bytes / seconds["quire"] / machine.copied_bytes_per_s
                figures[f"{name}.share_of_copy"] = Figure(share, "")
            else:
                share = num_bytes / 2 * num_tokens / seconds["quire"] / machine.flops
                figures[f"{name}.share_of_matmul"] = Figure(share, "")
    return figures


def make_cache(num_seqs: int, seq_len: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Caches to take in turn, block tables in no order, and lengths."""
    width = -(-seq_len // BLOCK_SIZE)
    shape = num_seqs * width + 1, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM
    num_bytes = 4 * torch.Size(shape).numel()
    caches = [torch.randn(shape) for _ in range(max(2, min(16, ROTATED_BYTES // num_bytes)))]
    tables = (torch.randperm(num_seqs * width) + 1).view(num_seqs, width).int()
    return caches, tables, torch.full((num_seqs,), seq_len, dtype=torch.int32)


def gathered(kv_cache: Tensor, tables: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Keys and values as PyTorch's attention wants them, each [S, Hkv, L, D]."""
    blocks = kv_cache[tables.long()].permute(2, 0, 3, 1, 4, 5)
    keys, values = blocks.reshape(2, len(tables), NUM_KV_HEADS, -1, HEAD_DIM)[..., :seq_len, :]
    return keys, values


def decode(kv_cache: Tensor, q: Tensor, tables: Tensor, lens: Tensor) -> Tensor:
    return paged_decode_attention(q, kv_cache, tables, lens, SCALE)


def decode_by_sdpa(kv_cache: Tensor, q: Tensor, tables: Tensor, seq_len: int) -> Tensor:
    grouped = q.view(len(q), NUM_KV_HEADS, -1, HEAD_DIM)
    return F.scaled_dot_product_attention(grouped, *gathered(kv_cache, tables, seq_len), scale=SCALE)


def decodes(machine: Machine, repetitions: int) -> dict[str, Figure]:
    figures = {}
    for num_seqs, seq_len in DECODES:
        caches, tables, lens = make_cache(num_seqs, seq_len)
        q = torch.randn(num_seqs, NUM_HEADS, HEAD_DIM)
        seconds = time_in_turns(
            {
                "quire": in_turn(decode, caches, q, tables, lens),
                "gather_sdpa": in_turn(decode_by_sdpa, caches, q, tables, seq_len),
            },
            repetitions,
        )
        name = f"kernels.paged_decode.s{num_seqs}_l{seq_len}"
        rate = num_seqs * seq_len * 2 * NUM_KV_HEADS * HEAD_DIM * 4 / seconds["quire"]
        figures |= op_figures(name, seconds)
        figures[f"{name}.share_of_copy"] = Figure(rate / machine.copied_bytes_per_s, "")
    return figures


def prefill(kv_cache: Tensor, q: Tensor, tables: Tensor, starts: Tensor, lens: Tensor) -> Tensor:
    return paged_prefill_attention(q, kv_cache, tables, starts, lens, SCALE)


def prefill_by_sdpa(kv_cache: Tensor, q: Tensor, tables: Tensor, mask: Tensor) -> Tensor:
    keys_values = gathered(kv_cache, tables, mask.shape[1])
    wide = (x.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1) for x in keys_values)
    return F.scaled_dot_product_attention(q.transpose(0, 1)[None], *wide, attn_mask=mask, scale=SCALE)


def prefills(machine: Machine, repetitions: int) -> dict[str, Figure]:
    figures = {}
    for cached_len, chunk_len in PREFILLS:
        caches, tables, lens = make_cache(1, cached_len + chunk_len)
        q = torch.randn(chunk_len, NUM_HEADS, HEAD_DIM)
        starts = torch.tensor([0, chunk_len], dtype=torch.int32)
        mask = torch.ones(chunk_len, cached_len + chunk_len, dtype=torch.bool).tril(cached_len)
        seconds = time_in_turns(
            {
                "quire": in_turn(prefill, caches, q, tables, starts, lens),
                "gather_sdpa": in_turn(prefill_by_sdpa, caches, q, tables, mask),
            },
            repetitions,
        )
        name = f"kernels.paged_prefill.p{cached_len}_c{chunk_len}"
        flops = 4 * int(mask.sum()) * NUM_HEADS * HEAD_DIM / seconds["quire"]
        figures |= op_figures(name, seconds)
        figures[f"{name}.share_of_matmul"] = Figure(flops / machine.flops, "")
    return figures


def small_ops(repetitions: int) -> dict[str, Figure]:
    figures = {}
    weight, eps = torch.ones(512), 1e-5
    for num_tokens in (1, 64, 1024):
        x, residual = torch.randn(num_tokens, 512), torch.zeros(num_tokens, 512)
        gate_up = torch.randn(num_tokens, 3072)
        seconds = time_in_turns(
            {
                "quire": partial(add_rms_norm, x, residual, weight, eps),
                "torch": in_turn(
                    lambda x, residual: torch.rms_norm(residual.add_(x), (512,), weight, eps), [x], residual
                ),
            },
            10 * repetitions,
        )
        figures |= op_figures(f"kernels.add_rms_norm.t{num_tokens}", seconds)
        seconds = time_in_turns(
            {
                "quire": partial(silu_and_mul, gate_up),
                "torch": in_turn(lambda halves: F.silu(halves[0]) * halves[1], [gate_up.chunk(2, dim=-1)]),
            },
            10 * repetitions,
        )
        figures |= op_figures(f"kernels.silu_and_mul.t{num_tokens}", seconds)
    return figures


def all_reduces(repetitions: int) -> dict[str, Figure]:
    """Two ranks, this process and a child, on one thread each."""
    store, port = open_store(HOST)
    child = subprocess.Popen([sys.executable, "-m", "benchmarks.kernels", "--peer", f"{port} {repetitions}"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = reduce_in_turns(0, port, repetitions)
    finally:
        torch.set_num_threads(threads)
        child.wait(60)
    del store
    figures = {}
    for num_bytes, values in seconds.items():
        figures |= op_figures(f"kernels.all_reduce.{num_bytes}b", values)
    return figures


def reduce_in_turns(rank: int, port: int, repetitions: int) -> dict[int, dict[str, float]]:
    """By bytes: median seconds over shared memory and over gloo."""
    comm = join(rank, 2, HOST, port, "gloo", 60)
    if not isinstance(comm, SharedMemory):
        return {}
    seconds = {}
    for num_bytes in ALL_REDUCE_BYTES:
        data = torch.zeros(num_bytes // 4)
        ops: dict[str, Op] = {
            "quire": partial(comm.all_reduce, data),
            "gloo": partial(comm.group.all_reduce, data),
        }
        seconds[num_bytes] = time_in_turns(ops, 10 * repetitions)
    comm.close()
    return seconds


def main() -> None:
    line = parser(__doc__)
    line.add_argument("--repetitions", type=int, default=20)
    line.add_argument(
        "--peer", metavar="PORT REPETITIONS", help="be the second rank of the all-reduce; used by itself"
    )
    arguments = line.parse_args()
    if arguments.peer:
        port, repetitions = map(int, arguments.peer.split())
        torch.set_num_threads(1)
        reduce_in_turns(1, port, repetitions)
        return
    with torch.inference_mode():
        machine = Machine(arguments.repetitions)
        figures = machine.figures()
        figures |= linears(machine, arguments.repetitions)
        figures |= decodes(machine, arguments.repetitions)
        figures |= prefills(machine, arguments.repetitions)
        figures |= small_ops(arguments.repetitions)
        figures |= all_reduces(arguments.repetitions)
    note = f"CPU, {torch.get_num_threads()} threads; no GPU figures"
    report({name: Figure(f.value, f.unit, note) for name, f in figures.items()}, arguments.json)


if __name__ == "__main__":
    main()
