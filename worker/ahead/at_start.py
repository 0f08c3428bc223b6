"""The process that compiles kernel variants beside the start of a rank; see StartCompilation."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path

from triton import knobs

from ..rank.start_compilation import CompileRequest
from .variants import compile_variants, record_variants

# Each imports torch and Triton, in about 0.4 GB.
MAX_PROCESSES = 16


def serve_request() -> None:
    """Compile what the parent asks for on stdin, unless it is compiled; print how that went, as JSON."""
    request: CompileRequest = pickle.load(sys.stdin.buffer)  # noqa: S301  (from the process that started this one)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    print(json.dumps(compile_once(request)), flush=True)
    os._exit(0)  # torch's CUDA is replaced, and shall not be shut down


def compile_once(request: CompileRequest) -> str:
    """Compile the variants into Triton's cache, unless another rank of the node does or has; return what was done."""
    folder = Path(knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    stamp = folder / request.stamp
    with (folder / "quire.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the parent's deadline
        if stamp.exists():
            return "kernels were compiled before the start, or by another rank of the node"
        started = time.monotonic()
        # Of the ranks, the first one alone samples tokens for the host, and the last one may hold less.
        ranks = sorted({0, request.config.parallel.tensor_parallel_size - 1})
        variants = record_variants(request.config, ranks, request.capability, request.gpu_bytes)
        recorded = time.monotonic()
        num_processes = min(len(os.sched_getaffinity(0)), MAX_PROCESSES, max(1, len(variants)))
        compiled = list(compile_variants(variants, request.capability, num_processes))
        problems = [problem for _, problem in compiled if problem is not None]
        if not problems:
            stamp.touch()
    now, num_compiled = time.monotonic(), len(variants) - len(problems)
    text = f"recorded {len(variants)} kernel variants in {recorded - started:.1f} s, "
    text += f"compiled {num_compiled} in {now - recorded:.1f} s by {num_processes} processes"
    return f"{text}; first problem: {problems[0]}" if problems else text


def _end_with_parent() -> None:
    """Wait until the parent has ended, which closes the pipe, and end the process with all that it started."""
    sys.stdin.buffer.read()
    os.killpg(os.getpgid(0), signal.SIGKILL)
