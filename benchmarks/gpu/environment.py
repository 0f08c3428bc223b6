"""Stage `environment`: versions, device, and the roofs that other figures are shares of."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import subprocess
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.record import Record
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.table import NOT_SHOWN
from benchmarks.gpu.timing import copy_rate, matmul_rate, seconds_per_call

_PACKAGES = (
    "torch", "triton", "numpy", "transformers", "safetensors", "tokenizers", "msgpack", "flashinfer-python",
    "flash-attn", "flash-attn-3", "deep-gemm", "flash-linear-attention",
)  # fmt: skip
_QUERY = "name,driver_version,memory.total,clocks.max.sm,clocks.max.memory,power.limit"


def run(record: Record, folder: Path, work: Path, sizes: Sizes) -> None:
    with record.case("versions"):
        record.note("not shown", list(NOT_SHOWN))
        record.note("python", platform.python_version())
        record.note("packages", {name: _version(name) for name in _PACKAGES})
    if sizes.device == "cuda":
        with record.case("device"):
            properties = torch.cuda.get_device_properties(0)
            record.note("properties", str(properties))
            record.note("nvidia-smi", _nvidia_smi())
            record.add("device.memory", properties.total_memory, "bytes")
            record.add("device.multiprocessors", properties.multi_processor_count, "")
    dtype = getattr(torch, sizes.dtype)
    with record.case("copy"):
        record.add("roof.copy", copy_rate(sizes.copy_bytes, sizes.device, sizes.repeat_s), "bytes/s")
    with record.case("matmul"):
        rate = matmul_rate(sizes.matmul_len, dtype, sizes.device, sizes.repeat_s)
        record.add("roof.matmul", rate, "FLOP/s", f"{sizes.dtype}, {sizes.matmul_len} cubed")
    if sizes.device == "cuda":
        with record.case("host to device"):
            _measure_transfers(record, sizes)
        with record.case("fp8 matmul"):
            for fast in (False, True):
                rate = _fp8_rate(sizes, fast)
                record.add(f"roof.matmul_fp8{'_fast' * fast}", rate, "FLOP/s", "a scale per row and column")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _nvidia_smi() -> str:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()


def _measure_transfers(record: Record, sizes: Sizes) -> None:
    """Measure pinned transfers, and the time from a launch to its result on the host."""
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    for name, op in (
        ("to_device", lambda: device.copy_(host, True)),
        ("to_host", lambda: host.copy_(device, True)),
    ):
        seconds = seconds_per_call([op], "cuda", sizes.repeat_s)
        record.add(f"roof.{name}", host.nbytes / seconds, "bytes/s", "pinned memory")


def _fp8_rate(sizes: Sizes, fast: bool) -> float:
    length = sizes.matmul_len
    a, b = (torch.randn(length, length, device="cuda").to(torch.float8_e4m3fn) for _ in "ab")
    rows, columns = torch.ones(length, 1, device="cuda"), torch.ones(1, length, device="cuda")
    product = partial(
        torch._scaled_mm, a, b.t(), rows, columns, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return 2 * length**3 / seconds_per_call([product], "cuda", sizes.repeat_s)
