"""The wheel: built, installed into an empty folder and used from there."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = "proto", "kernels", "worker", "scheduler", "cluster"
FILES = "__init__.py", "py.typed", "setup.py", "pyproject.toml", "README.md", "LICENSE"

USE = """
import sys, quire, quire.cluster.demo
from importlib.resources import files
from quire import LLM, SamplingParams
assert quire.__file__.startswith(sys.argv[1]), quire.__file__
page = {each.name for each in (files("quire.cluster.http") / "page").iterdir()}
assert {"index.html", "page.js", "page.css"} <= page
with LLM(model="demo") as llm:
    (answer,) = llm.generate(["It was a dark evening, and"], SamplingParams(max_tokens=8, temperature=0.0))
assert len(answer.outputs[0].token_ids) == 8
assert "ray" not in sys.modules
"""

HAS_OPS = """
from quire.kernels.native.library import is_available
assert is_available()
"""


def run(*command: str, **options: Any) -> str:
    """Run a command and return its stdout."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def install_wheel(tmp_path_factory: pytest.TempPathFactory, **variables: str) -> Path:
    """Build the wheel, with variables of setup.py, and return the folder into which it is installed."""
    source, wheels, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "target"))
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    pip = sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"
    build = "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(source)
    run(*pip, *build, cwd=str(wheels), env=os.environ | variables)
    (wheel,) = wheels.glob("quire-*.whl")
    run(*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel), cwd=str(wheels))
    return target


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the pure wheel is installed."""
    return install_wheel(tmp_path_factory)


def test_wheel_holds_the_package_and_nothing_else(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names <= {"quire", "bin"}
    package = installed / "quire"
    assert {path.name for path in package.iterdir() if path.is_dir()} - {"__pycache__"} == set(FOLDERS)
    for needed in ("py.typed", "proto/inference.proto", "cluster/demo/model/model.safetensors"):
        assert (package / needed).is_file(), needed


def test_installed_package_generates(installed: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    run(sys.executable, "-c", USE, str(installed), cwd=str(tmp_path), env=environment)


def test_installed_command_prints_help(installed: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    output = run(str(installed / "bin" / "quire"), "--help", cwd=str(tmp_path), env=environment)
    assert "serve" in output


@pytest.mark.slow
def test_wheel_of_a_platform_needs_no_compiler(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    installed = install_wheel(
        tmp_path_factory, QUIRE_WHEEL_PLATFORM=f"linux_{platform.machine()}", QUIRE_WHEEL_CXX="c++"
    )
    assert (installed / "quire/kernels/native/prebuilt/ops-baseline.so").is_file()
    environment = os.environ | {
        "PYTHONPATH": str(installed),
        "HF_HUB_OFFLINE": "1",
        "CXX": "no-such-compiler",
        "QUIRE_CACHE_DIR": str(tmp_path / "cache"),
    }
    run(sys.executable, "-c", USE + HAS_OPS, str(installed), cwd=str(tmp_path), env=environment)
    assert not (tmp_path / "cache").exists()
