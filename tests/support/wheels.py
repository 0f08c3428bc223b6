"""Builds and installs the wheel, for tests that use it from there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = "proto", "kernels", "worker", "scheduler", "cluster"
FILES = (
    "__init__.py",
    "__main__.py",
    "py.typed",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "NOTICE",
)

USE = """
import sys, quire, quire.cluster.cli.demo
from importlib.resources import files
from quire import LLM, SamplingParams
assert quire.__file__.startswith(sys.argv[1]), quire.__file__
page = {each.name for each in (files("quire.cluster.gateway.http") / "page").iterdir()}
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


PIP = sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"


def run(*command: str, timeout: float = 240, **options: Any) -> str:
    """Run a command and return its stdout."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return str(result.stdout)


def build_wheel(tmp_path_factory: pytest.TempPathFactory, **variables: str) -> Path:
    """Build the wheel, with variables of setup.py."""
    source, wheels = (tmp_path_factory.mktemp(name) for name in ("source", "wheels"))
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    build = "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(source)
    run(
        *PIP, *build, timeout=900, cwd=str(wheels), env=os.environ | variables
    )  # compiles for each instruction set
    (wheel,) = wheels.glob("quire-*.whl")
    return wheel


def install_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel, without its dependencies, into a folder of its own."""
    target = tmp_path_factory.mktemp("target")
    options = "--no-deps", "--no-index", "--no-compile", "--target", str(target)
    run(*PIP, "install", *options, str(wheel), cwd=str(target))
    return target
