"""Compilation of every kernel, with its tiles, for the supported GPUs; needs no GPU.

`make test-triton` runs it with every supported Triton.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "support" / "compile_kernels.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", ["80", "90"])
def test_every_kernel_compiles(capability: str, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, str(SCRIPT), capability]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-2000:]
    version, *variants = done.stdout.splitlines()
    assert version == f"triton {triton.__version__}"
    kernels = {variant.split()[0] for variant in variants}
    assert len(kernels) >= 10, kernels
