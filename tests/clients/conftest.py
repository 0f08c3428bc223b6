"""One HTTP server with a tiny model for all clients, and the environments that `make test-clients` has made."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chat_model import PARSERS, chat_model
from local_server import ThreadedServer, threaded_server

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
ENVIRONMENTS = ROOT / "build" / "clients"
CLIENT_TIMEOUT_S = 240

# Runs a program of an environment, `run(environment, *command)`, and returns its output.
RunProgram = Callable[..., str]


@pytest.fixture(scope="session")
def model_dir(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(make_model("llama"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def server(model_dir: Path) -> Iterator[ThreadedServer]:
    with threaded_server(model_dir, **PARSERS) as server:
        yield server


@pytest.fixture(autouse=True)
def blocks_are_free_after_each_test(server: ThreadedServer) -> Iterator[None]:
    """No client may leave a sequence or a block behind."""
    yield
    server.wait_until_free()


@pytest.fixture
def run_program(tmp_path: Path) -> RunProgram:
    def run(environment: str, *command: str | Path) -> str:
        folder = ENVIRONMENTS / environment
        assert folder.is_dir(), f"{folder} is missing; `make test-clients` makes it"
        variables = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "PYTHONPATH": str(ROOT / "tests" / "support"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # litellm would fetch it at import
        }
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S
        )
        assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
