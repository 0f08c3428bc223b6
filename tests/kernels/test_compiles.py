"""Compilation of every kernel, with its tiles, for the supported GPUs and by each supported Triton; needs no GPU.

`make test-all` installs the other versions of Triton in build/triton; without them, the installed one is tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched_kernels import launched_kernels
from quick_cases import slow_except

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "compile_kernels.py"
VERSIONS = sorted(path.parent.name for path in ROOT.glob("build/triton/*/.ready"))


def run_script(*arguments: str, **environment: str) -> list[str]:
    """Return the lines that compile_kernels.py prints without Triton's interpreter."""
    pytest.importorskip("triton")
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=3500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_every_launched_kernel_is_compiled_by_some_case() -> None:
    run_script("90", "bind")


def test_sum_over_ranks_has_one_variant_for_all_ranks_and_wide_loads(tmp_path: Path) -> None:
    """A second variant would be compiled while the kernel of another rank waits for this one."""
    _, *variants = run_script("90", "launch_all_reduces", TRITON_CACHE_DIR=str(tmp_path))
    assert len(variants) == 2 * 3


@pytest.mark.slow
def test_indexer_has_one_variant_for_all_parts_of_a_step(tmp_path: Path) -> None:
    _, *variants = run_script("90", "launch_all_sparse_latents", TRITON_CACHE_DIR=str(tmp_path))
    assert len([each for each in variants if each.startswith("index_scores.")]) == 2 * 4


@pytest.mark.parametrize("capability", slow_except(["90"], ["80", "90"]))
def test_packed_weights_are_copied_16_bytes_at_a_time_and_ahead(capability: str, tmp_path: Path) -> None:
    """Products of few tokens take as long as reading the weights; their groups are shorter than a tile."""
    _, *variants = run_script(capability, "launch_all_packed_weights", TRITON_CACHE_DIR=str(tmp_path))
    products = [each for each in variants if "_linear " in each]
    assert len(products) == 2 * 3 * 2


@pytest.mark.slow
def test_float8_groups_are_copied_ahead_with_their_scales(tmp_path: Path) -> None:
    """Scales are no factors of products, which alone are copied ahead by default."""
    _, *variants = run_script("90", "launch_all_float8_groups", TRITON_CACHE_DIR=str(tmp_path))
    assert len([each for each in variants if each.startswith("float8_groups.")]) == 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", ["80", "90", "100"])
@pytest.mark.parametrize("version", VERSIONS or ["installed"])
def test_every_kernel_compiles(version: str, capability: str, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    environment = {"TRITON_CACHE_DIR": str(tmp_path)}
    if version == "installed":
        version = triton.__version__
    else:
        folders = str(ROOT / "build" / "triton" / version), os.environ.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    first, *variants = run_script(capability, **environment)
    assert first == f"triton {version}"
    assert {variant.split()[0] for variant in variants} == launched_kernels(int(capability))
