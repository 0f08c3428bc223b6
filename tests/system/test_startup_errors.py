"""A wrong setting ends `quire serve` with a one-line error and an exit status, without a traceback."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

RunQuire = Callable[..., "subprocess.CompletedProcess[str]"]


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


def test_missing_weights(run_quire: RunQuire, model_copy: Path) -> None:
    (model_copy / "model.safetensors").unlink()
    assert_refused(run_quire("serve", str(model_copy)), "safetensors", str(model_copy))


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


def test_more_ranks_than_the_machine_carries(run_quire: RunQuire) -> None:
    assert_refused(run_quire("serve", "demo", "--tensor-parallel-size", "4096"), "4096", "cores")


def test_ranks_that_do_not_divide_the_heads(run_quire: RunQuire) -> None:
    result = run_quire("serve", "demo", "--tensor-parallel-size", "3", "--listen", "127.0.0.1:0")
    assert_refused(result, "3", "heads")


def test_no_such_model(run_quire: RunQuire, tmp_path: Path) -> None:
    assert_refused(run_quire("serve", str(tmp_path / "nothing")), "nothing")


def test_no_server_at_the_target(run_quire: RunQuire) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    assert_refused(run_quire("status", "--target", address), address)
