"""Compilation of every kernel, with its tiles, for the supported GPUs and by each supported Triton; needs no GPU.

`make test-all` installs the other versions of Triton in build/triton; without them, the installed one is tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "compile_kernels.py"
VERSIONS = sorted(path.parent.name for path in ROOT.glob("build/triton/*/.ready"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", ["80", "90", "100"])
@pytest.mark.parametrize("version", VERSIONS or ["installed"])
def test_every_kernel_compiles(version: str, capability: str, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    if version == "installed":
        version = triton.__version__
    else:
        folders = str(ROOT / "build" / "triton" / version), environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    command = [sys.executable, str(SCRIPT), capability]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr[-2000:]
    first, *variants = done.stdout.splitlines()
    assert first == f"triton {version}"
    kernels = {variant.split()[0] for variant in variants}
    assert len(kernels) >= 20, kernels
