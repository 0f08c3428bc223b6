"""The wheel of this machine, with its C++ ops: it needs no compiler, and a clean environment serves from it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from wheels import HAS_OPS, ROOT, USE, build_wheel, install_wheel, run


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
