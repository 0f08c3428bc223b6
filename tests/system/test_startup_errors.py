"""A wrong setting ends `quire serve` with a one-line error and an exit status, without a traceback."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from deadlines import COMMAND_TIMEOUT_S

from quire.kernels.native.build import load_library

pytestmark = pytest.mark.cluster

RunQuire = Callable[..., "subprocess.CompletedProcess[str]"]

# Runs the command with each list of arguments in turn and prints [exit status, stdout, stderr] of each. Options are
# checked while Ray starts. Ray is left out here: it takes 5 seconds of processor time.
_RUN_WITHOUT_RAY = """
import contextlib, io, json, sys
from unittest import mock
from quire.cluster.cli import main

ends = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["quire", *arguments]
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            with mock.patch("quire.cluster.cli.serve.single_host.LocalCluster"):
                main()
        except SystemExit as end:
            ends.append([end.code, output.getvalue(), errors.getvalue()])
print(json.dumps(ends))
"""

_START_TWO_RANKS = """
import logging
from quire import LLM, SamplingParams

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    with LLM("demo", tensor_parallel_size=2) as llm:
        llm.generate("It", SamplingParams(max_tokens=1))
"""
_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo fake 1; exit; fi
echo built >> "{log}"
while [ "$1" != -o ]; do shift; done
cp "{library}" "$2"
"""


@pytest.fixture
def model_copy(demo_model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_model_dir, tmp_path / "model"))


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode in (1, 2), result
    assert "Traceback" not in result.stderr
    assert "ready" not in result.stdout
    problem = result.stderr.strip().splitlines()[-1]
    assert problem.startswith("quire: ")
    assert all(word in problem for word in words), problem


def test_port_in_use(run_quire: RunQuire) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert_refused(run_quire("serve", "demo", "--listen", address), address)


def test_truncated_weights(run_quire: RunQuire, model_copy: Path) -> None:
    weights = model_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    options = "--tensor-parallel-size", "2", "--listen", "127.0.0.1:0"
    assert_refused(run_quire("serve", str(model_copy), *options), "model.safetensors")


def test_unknown_architecture(run_quire: RunQuire, model_copy: Path) -> None:
    config = json.loads((model_copy / "config.json").read_text())
    config["architectures"] = ["ImaginaryForCausalLM"]
    (model_copy / "config.json").write_text(json.dumps(config))
    assert_refused(run_quire("serve", str(model_copy), "--listen", "127.0.0.1:0"), "ImaginaryForCausalLM")


def test_options_that_do_not_fit_the_model_or_the_machine(demo_model_dir: Path, tmp_path: Path) -> None:
    model = shutil.copytree(demo_model_dir, tmp_path / "model")
    (model / "model.safetensors").unlink()
    listen = "--listen", "127.0.0.1:0"
    cases = [
        (["serve", str(model), *listen], ["safetensors", str(model)]),
        (["serve", "demo", "--tensor-parallel-size", "4096", *listen], ["4096", "heads"]),
        (["serve", "demo", "--tensor-parallel-size", "3", *listen], ["3", "heads"]),
        (["serve", str(tmp_path / "nothing"), *listen], ["nothing"]),
    ]
    command = [sys.executable, "-c", _RUN_WITHOUT_RAY, json.dumps([arguments for arguments, _ in cases])]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    assert ran.returncode == 0, ran.stderr
    for end, (arguments, words) in zip(json.loads(ran.stdout), cases, strict=True):
        assert_refused(subprocess.CompletedProcess(arguments, *end), *words)


def test_no_server_at_the_target(run_quire: RunQuire) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    assert_refused(run_quire("status", "--target", address), address)


def test_first_start_compiles_once_and_says_so_before_it_starts_ranks(tmp_path: Path) -> None:
    """Ranks that wait for each other have deadlines, and a compiler on a busy machine takes minutes."""
    library = load_library()
    if library is None:
        pytest.skip("there is no C++ compiler")
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(_COMPILER.format(log=log, library=library._name))
    compiler.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", _START_TWO_RANKS],
        env=os.environ | {"CXX": str(compiler), "QUIRE_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert log.read_text() == "built\n"
    assert 0 <= done.stderr.find("compiling the C++ ops") < done.stderr.find("starts 3 processes")
