"""Stage `again`: the ops that failed in stage `smoke`, each in a process of its own whose launches wait.

With compute-sanitizer, where CUDA's tools are installed, an access beyond a tensor is named with its kernel and line.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.gpu import ops, smoke
from benchmarks.gpu.record import Record, read_stage
from benchmarks.gpu.sizes import SIZES, Sizes

ROOT = Path(__file__).parents[2]
# The memory checker slows a kernel down up to a hundred times.
OP_S = 60.0
_MAX_OUTPUT = 4000


def run(record: Record, folder: Path, work: Path, sizes: Sizes) -> None:
    names = [case.name for case in ops.cases(sizes)]
    failed = [problem["case"] for problem in read_stage(folder, "smoke").get("problems", ())]
    chosen = [name for name in names if name in failed]
    record.add("again.ops", len(chosen), "", "that failed in smoke")
    for name in chosen:
        if record.begins(name, 5.0):
            with record.case(name):
                record.note(name, run_again(name, sizes.device, min(OP_S, record.seconds_left - 1)))


def run_again(name: str, device: str, limit_s: float) -> str:
    """Return the end of the output of a process that runs one op with launches that wait."""
    checker = shutil.which("compute-sanitizer") if device == "cuda" else None
    command = [sys.executable, "-m", "benchmarks.gpu.again", name, "--device", device]
    if checker is not None:
        command = [checker, "--tool", "memcheck", *command]
    # The allocator's blocks hide accesses beyond a tensor.
    environment = os.environ | {"CUDA_LAUNCH_BLOCKING": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return f"did not end in {limit_s:.0f} s"
    return f"exit status {done.returncode}\n{(done.stdout + done.stderr)[-_MAX_OUTPUT:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of an op's case")
    parser.add_argument("--device", choices=SIZES, required=True)
    arguments = parser.parse_args()
    with torch.inference_mode():
        for case in ops.cases(SIZES[arguments.device]):
            if case.name == arguments.name:
                smoke.compare_with_twin(case)
                print(f"{case.name} passes when launches wait")


if __name__ == "__main__":
    main()
