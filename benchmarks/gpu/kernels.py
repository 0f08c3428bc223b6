"""Stage `kernels`: every op beside PyTorch's and the roofs, and attention and experts with other tiles."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu import ops
from benchmarks.gpu.op_case import MakeOp, OpCase
from benchmarks.gpu.record import Record
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.timing import copy_rate, matmul_rate, num_copies, roof, seconds_per_call
from quire.kernels.quantized_linear import FLOAT8

# Attention tiles to try: (rows, keys, warps, stages).
DECODE_SWEEP = ((16, 64, 4, 3), (16, 64, 4, 5), (16, 64, 4, 7), (16, 128, 4, 3), (16, 128, 4, 5), (16, 128, 8, 5),
                (16, 32, 4, 7), (16, 64, 2, 5))  # fmt: skip
PREFILL_SWEEP = ((128, 64, 8, 3), (128, 64, 8, 5), (128, 128, 8, 3), (128, 128, 8, 5), (64, 64, 4, 3),
                 (64, 128, 4, 5))  # fmt: skip
# Tiles of experts: (tokens, outputs, inputs, warps, stages), for decodes and for prompts.
EXPERT_SWEEP = {
    16: ((16, 32, 128, 4, 4), (16, 64, 128, 4, 4), (16, 128, 64, 4, 4), (16, 64, 256, 4, 3)),
    4096: ((128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (64, 256, 64, 8, 3)),
}  # fmt: skip
# Of the sweep: rows and lengths of decodes, and the length of a prompt.
DECODES, PREFILL_LEN = ((64, 1024), (1, 65536)), 8192
# A case with fresh inputs needs about this long.
CASE_S = 3.0


def run(record: Record, folder: Path, work: Path, sizes: Sizes) -> None:
    dtype = getattr(torch, sizes.dtype)
    copy = roof(folder, "copy", lambda: copy_rate(sizes.copy_bytes, sizes.device, sizes.repeat_s))
    matmul = roof(
        folder, "matmul", lambda: matmul_rate(sizes.matmul_len, dtype, sizes.device, sizes.repeat_s)
    )
    with torch.inference_mode():
        for case in ops.cases(sizes):
            if record.begins(case.name, CASE_S):
                with record.case(case.name):
                    measure(record, case, copy, matmul, sizes)
        if sizes.device == "cuda":
            sweep(record, sizes, DECODES, PREFILL_LEN)


def measure(record: Record, case: OpCase, copy: float, matmul: float, sizes: Sizes) -> None:
    """Measure an op and its peers; add the share of the roof that bounds it."""
    seconds = time_op(case.make, case.num_bytes, sizes)
    is_compute = case.flops * copy > case.num_bytes * matmul
    if is_compute:
        record.add(f"kernels.{case.name}.tflops", case.flops / seconds / 1e12, "TFLOP/s")
        record.add(f"kernels.{case.name}.share_of_matmul", case.flops / seconds / matmul, "")
    else:
        record.add(f"kernels.{case.name}.share_of_copy", case.num_bytes / seconds / copy, "")
    record.add(f"kernels.{case.name}.us", 1e6 * seconds, "us")
    for name, make in case.peers.items():
        with record.case(f"{case.name} by {name}"):
            record.add(f"kernels.{case.name}.{name}_us", 1e6 * time_op(make, case.num_bytes, sizes), "us")


def time_op(make: MakeOp, num_bytes: int, sizes: Sizes) -> float:
    """Return the seconds of an op, over as many sets of inputs as the L2 cache requires."""
    torch.manual_seed(0)
    rotating = [make(index) for index in range(num_copies(num_bytes, sizes.device))]
    seconds = seconds_per_call(rotating, sizes.device, sizes.repeat_s)
    del rotating
    if sizes.device == "cuda":
        torch.cuda.empty_cache()
    return seconds


def sweep(record: Record, sizes: Sizes, decode_shapes: Sequence[tuple[int, int]], prefill_len: int) -> None:
    """Time attention with each of a few tiles, the cases that decide the tables of kernels.gpu.tile_configs.

    Args:
        decode_shapes: rows and length; the first one is measured with a quantized cache too.
    """
    decodes = [ops.decode_case(sizes, rows, length, None) for rows, length in decode_shapes]
    decodes.append(ops.decode_case(sizes, *decode_shapes[0], FLOAT8))
    prefills = [ops.prefill_case(sizes, prefill_len, stored) for stored in (None, FLOAT8)]
    for case in decodes:
        _try_tiles(record, case, "DECODE_TILES", DECODE_SWEEP, sizes)
    for case in prefills:
        _try_tiles(record, case, "LARGE_PREFILL_TILES", PREFILL_SWEEP, sizes)
    for tokens, tiles in EXPERT_SWEEP.items():
        _try_expert_tiles(record, next(ops.expert_cases(sizes, tokens)), tiles, sizes)


def _try_expert_tiles(
    record: Record, case: OpCase, tiles: tuple[tuple[int, int, int, int, int], ...], sizes: Sizes
) -> None:
    from quire.kernels.gpu import moe
    from quire.kernels.gpu.quantized_linear import TileConfig

    given = moe.TILES
    for tile in tiles:
        name = f"sweep.{case.name}.{'x'.join(map(str, tile))}"
        if record.begins(name, CASE_S):
            with record.case(name):
                moe.TILES = {1 << 31: TileConfig(*tile)}
                record.add(f"kernels.{name}.us", 1e6 * time_op(case.make, case.num_bytes, sizes), "us")
        moe.TILES = given


def _try_tiles(
    record: Record, case: OpCase, table: str, tiles: tuple[tuple[int, int, int, int], ...], sizes: Sizes
) -> None:
    from quire.kernels.gpu import paged_decode, paged_prefill, tile_configs

    module = paged_decode if table == "DECODE_TILES" else paged_prefill
    given = getattr(module, table)
    for tile in tiles:
        name = f"sweep.{case.name}.rows{tile[0]}_keys{tile[1]}_warps{tile[2]}_stages{tile[3]}"
        if record.begins(name, CASE_S):
            with record.case(name):
                setattr(module, table, {(None,) * 5: tile_configs.TileConfig(*tile)})
                started = time.perf_counter()
                seconds = time_op(case.make, case.num_bytes, sizes)
                note = f"{time.perf_counter() - started:.1f} s with its compilation"
                record.add(f"kernels.{name}.us", 1e6 * seconds, "us", note)
        setattr(module, table, given)
