"""Build of the C++ ops: once, into the cache, with a fallback if it fails."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from deadlines import PROGRAM_TIMEOUT_S

from quire.kernels import activation
from quire.kernels.native import build as native
from quire.kernels.native import instruction_sets, sources
from quire.kernels.norm import rms_norm

FAKE_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo fake 1; exit; fi
echo built >> "{log}"
while [ "$1" != -o ]; do shift; done
sleep 0.3
cp "{library}" "$2"
"""

GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu_and_mul": torch.nn.functional.silu,
    "gelu_tanh_and_mul": partial(torch.nn.functional.gelu, approximate="tanh"),
}

LOAD = "from quire.kernels.native.build import load_library; assert load_library() is not None"


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up a compiler that copies the existing library and logs each call. Returns the path of the log."""
    found = native.load_library()
    if found is None:
        pytest.skip("there is no C++ compiler")
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(FAKE_COMPILER.format(log=log, library=found._name))
    compiler.chmod(0o755)
    log.touch()
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    return log


def load_in_new_process() -> None:
    subprocess.run([sys.executable, "-c", LOAD], check=True, timeout=PROGRAM_TIMEOUT_S)


def test_concurrent_processes_build_once(fake_compiler: Path) -> None:
    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(load_in_new_process) for _ in range(3)]:
            done.result()
    assert fake_compiler.read_text() == "built\n"
    built = [path.suffix for path in native.cache_directory().iterdir()]
    assert sorted(built) == [".lock", ".so"]


def test_fingerprint_depends_on_compiler_flags_and_sources(
    fake_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = str(tmp_path / "compiler")
    first = native._fingerprint(compiler, ("-O3",))
    assert native._fingerprint(compiler, ("-O2",)) != first
    folder = tmp_path / "sources"
    shutil.copytree(sources._FOLDER, folder)
    monkeypatch.setattr(sources, "_FOLDER", folder)
    assert native._fingerprint(compiler, ("-O3",)) == first
    (folder / "linear.cpp").write_text("// changed")
    assert native._fingerprint(compiler, ("-O3",)) != first


def test_cache_directory_follows_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("QUIRE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.cache_directory() == tmp_path / "quire"
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "own"))
    assert native.cache_directory() == tmp_path / "own"


@pytest.mark.parametrize(
    ("compiler", "message"),
    [("no-such-compiler", "no C++ compiler"), (__file__, "no C++ compiler"), ("false", "false failed")],
)
def test_missing_or_failing_compiler_is_logged(
    compiler: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    load = native.load_library.__wrapped__
    with caplog.at_level(logging.WARNING):
        assert load() is None
    (record,) = caplog.records
    assert message in record.getMessage()


def test_compiler_that_does_not_know_tile_registers_builds_another_set(
    fake_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "compiler"
    refusal = '#!/bin/sh\ncase "$*" in *-mamx-tile*) echo unknown flag >&2; exit 1;; esac\n'
    compiler.write_text(refusal + compiler.read_text())
    tiles = {"amx_tile", "amx_bf16", "avx512_bf16", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
    features = frozenset(tiles | {"avx2", "fma", "f16c", "bmi1", "bmi2"})
    monkeypatch.setattr(instruction_sets, "processor_features", lambda: features)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.delenv(instruction_sets.VARIABLE, raising=False)
    with caplog.at_level(logging.WARNING):
        assert native.load_library.__wrapped__() is not None
    assert "C++ ops use avx512+avx512_bf16 instead of amx, which is slower" in caplog.text
    assert "unknown flag" in caplog.text


def test_unwritable_cache_disables_native_ops(
    fake_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert native.load_library.__wrapped__() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [16, 32, 80, 512])
@pytest.mark.parametrize("gate", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gates_support_extreme_numbers(gate: str, dtype: torch.dtype, length: int) -> None:
    numbers = torch.linspace(-120, 120, 3 * length).view(3, length)
    numbers[2, -1] = torch.nan
    gate_up = torch.cat((numbers, torch.ones_like(numbers)), dim=1).to(dtype)
    exact = GATES[gate](gate_up[:, :length].double())
    out = getattr(activation, gate)(gate_up).double()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out, exact, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_of_strided_heads(dtype: torch.dtype) -> None:
    wide, weight = torch.randn(5, 7, 32).to(dtype), torch.randn(32).to(dtype)
    heads = wide[:, 1:4]
    x = heads.double()
    exact = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(rms_norm(heads, weight, 1e-6).double(), exact, atol=tolerance, rtol=tolerance)


def test_library_is_built_before_processes_that_wait_for_each_other(fake_compiler: Path) -> None:
    native.build_library()
    assert fake_compiler.read_text() == "built\n"
    load_in_new_process()
    assert fake_compiler.read_text() == "built\n"
