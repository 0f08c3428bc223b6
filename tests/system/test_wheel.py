"""The wheel: built, installed into an empty folder and used from there."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

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


PIP = sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"


def run(*command: str, timeout: float = 240, **options: Any) -> str:
    """Run a command and return its stdout."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


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


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the pure wheel is installed."""
    return install_wheel(build_wheel(tmp_path_factory), tmp_path_factory)


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


@pytest.fixture(scope="module")
def platform_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this machine, with its C++ ops."""
    variables = {"QUIRE_WHEEL_PLATFORM": f"linux_{platform.machine()}", "QUIRE_WHEEL_CXX": "c++"}
    return build_wheel(tmp_path_factory, **variables)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_wheel_of_a_platform_needs_no_compiler(
    platform_wheel: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    installed = install_wheel(platform_wheel, tmp_path_factory)
    assert (installed / "quire/kernels/native/prebuilt/ops-baseline.so").is_file()
    environment = os.environ | {
        "PYTHONPATH": str(installed),
        "HF_HUB_OFFLINE": "1",
        "CXX": "no-such-compiler",
        "QUIRE_CACHE_DIR": str(tmp_path / "cache"),
    }
    run(sys.executable, "-c", USE + HAS_OPS, str(installed), cwd=str(tmp_path), env=environment)
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(3000)
def test_clean_environment_without_compiler_serves_the_demo_model(
    platform_wheel: Path, tmp_path: Path
) -> None:
    programs = tmp_path / "environment" / "bin"
    run(sys.executable, "-m", "venv", str(programs.parent))
    pip = str(programs / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"
    run(*pip, "--constraint", str(ROOT / "constraints.txt"), str(platform_wheel), timeout=1200)
    # Of the programs of this machine, none is in sight.
    environment = {"PATH": str(programs), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [str(programs / "quire"), "serve", "demo", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    log = tmp_path / "log"
    with log.open("w") as stderr, subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=stderr, text=True
    ) as server:  # fmt: skip
        try:
            assert server.stdout is not None
            lines = [server.stdout.readline(), server.stdout.readline()]
            assert lines[1].startswith("quire is ready on "), log.read_text()
            url = lines[0].split()[-1]
            body = json.dumps({"model": "demo", "prompt": "It was", "max_tokens": 4}).encode()
            request = Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
            with urlopen(request, timeout=60) as reply:
                assert json.load(reply)["usage"]["completion_tokens"] == 4
            server.terminate()
            assert server.wait(60) == 0
        finally:
            server.kill()
    run(str(programs / "python"), "-c", HAS_OPS, cwd=str(tmp_path), env=environment)
