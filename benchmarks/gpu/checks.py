"""Stage `checks`: the tests marked gpu, and small kernels under CUDA's memory checker if time is left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from benchmarks.gpu.record import Record
from benchmarks.gpu.sizes import Sizes

ROOT = Path(__file__).parents[2]
TESTS = ("tests/kernels", "tests/worker")
# One test file for the checker, which slows a kernel down a hundred times.
CHECKED = "tests/kernels/test_gpu_elementwise.py"
CHECKER_S = 60.0
_MAX_OUTPUT = 6000


def run(record: Record, folder: Path, work: Path, sizes: Sizes) -> None:
    with record.case("tests"):
        marker = "gpu" if sizes.device == "cuda" else "gpu and not gpu"
        _run_tests(record, marker, record.seconds_left)
    checker = shutil.which("compute-sanitizer")
    if checker is None or sizes.device != "cuda" or not record.begins("memory checker", CHECKER_S):
        return
    with record.case("memory checker"):
        _run_checker(record, checker)


def _run_tests(record: Record, marker: str, limit_s: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker,
            f"--junitxml={report}", *TESTS,
        ]  # fmt: skip
        done = _run(command, limit_s)
        record.note("test output", done.stdout[-_MAX_OUTPUT:] + done.stderr[-_MAX_OUTPUT:])
        suite = ET.parse(report).getroot().find("testsuite")
        assert suite is not None
        for kind in ("tests", "failures", "errors", "skipped"):
            record.add(f"checks.{kind}", float(suite.get(kind, "0")), "")
    # 5: no test has the marker.
    assert done.returncode in (0, 5), f"pytest ended with {done.returncode}"


def _run_checker(record: Record, checker: str) -> None:
    command = [
        checker, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "pytest", "-q", "-x",
        "-p", "no:cacheprovider", "-m", "gpu", CHECKED,
    ]  # fmt: skip
    # The allocator's blocks hide accesses beyond a tensor.
    done = _run(command, record.seconds_left, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    record.note("memory checker", done.stdout[-_MAX_OUTPUT:])
    record.add("checks.memory_checker", done.returncode, "", "exit status; 9 if it found an error")
    assert done.returncode == 0, f"the memory checker ended with {done.returncode}"


def _run(
    command: list[str], limit_s: float, more: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(more or {})},
        capture_output=True,
        text=True,
        timeout=max(1.0, limit_s - 2),
    )
