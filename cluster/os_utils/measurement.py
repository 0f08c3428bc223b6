"""Measured figures as a JSON file that says what was measured: the command, the day, the machine and the commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GIT_TIMEOUT_S = 10.0
# What decides how fast a processor computes: a flag of Linux |-> its name, the fastest first.
_INSTRUCTION_SETS = {"amx_bf16": "AMX", "avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON"}


def machine() -> str:
    """Return the processor, its fastest instruction set, the cores and the Python version in one line."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in info.splitlines())
    }
    flags = names.get("flags", names.get("Features", "")).split()
    best = next((f" with {name}" for flag, name in _INSTRUCTION_SETS.items() if flag in flags), "")
    requested = os.environ.get("QUIRE_CPU_ISA")
    forced = f" (QUIRE_CPU_ISA={requested})" if requested else ""
    model = names.get("model name") or platform.processor() or platform.machine()
    cores = f"{os.cpu_count()} cores"
    if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) != os.cpu_count():
        cores = f"{len(os.sched_getaffinity(0))} of {cores}"
    return f"{model}{best}{forced}, {cores}, Python {platform.python_version()}"


def commit(folder: Path = Path(__file__).parent) -> str:
    """Return the first eight digits of the commit checked out around the folder, empty if there is none.

    Changes that are not committed are told by `+changes`, except of other measurements.
    """
    digits = _git(folder, "rev-parse", "--short=8", "HEAD")
    status = _git(folder, "status", "--porcelain", "--", ":(top)", ":(top,exclude)benchmarks/results")
    return digits + ("+changes" if digits and status else "")


def write_measurement(path: Path, command: str, figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Write {"command", "date", "machine", "commit", "figures"} as JSON, atomically.

    Args:
        command: repeats the measurement.
        figures: name |-> {"value", "unit", "note"}.
    """
    record = {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "commit": commit(),
        "figures": figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(record, indent=1) + "\n")
    unfinished.replace(path)


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=GIT_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):  # no git, or a hung file system
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
