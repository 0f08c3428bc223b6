"""Compiles a kernel ahead of time and launches it: prints the number of its variants in the cache after each.

Usage: ``compile_ahead.py``, with TRITON_CACHE_DIR set to an empty directory.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import triton
from compile_kernels import Compilations
from triton.runtime.jit import JITFunction

from quire.kernels.gpu import norm, sample_full
from quire.worker.ahead.variants import compile_variants, note_variants

CAPABILITY = 90


def launch() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.zeros(3, 64, dtype=dtype)
        norm.rms_norm(x, x[0], 1e-5)
    sample_full.sample_greedy(torch.zeros(3, 300), 0, None, None)  # whose kernel takes a named tuple


def num_compiled() -> int:
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin")))


def main() -> None:
    run = JITFunction.run
    variants = note_variants(CAPABILITY)
    launch()
    problems = [problem for _, problem in compile_variants(list(variants), CAPABILITY, 2)]
    print([each for each in problems if each], num_compiled())
    JITFunction.run, triton.knobs.runtime.jit_cache_hook = run, None
    for value in [*vars(norm).values(), *vars(sample_full).values()]:
        if isinstance(value, JITFunction):
            value.device_caches.clear()
    compilations = Compilations(CAPABILITY, binds_only=False)
    compilations.install()
    launch()
    print(sorted(compilations.kernels), num_compiled())


if __name__ == "__main__":
    main()
