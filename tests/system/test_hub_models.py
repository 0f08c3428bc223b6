"""A model of the hub, downloaded by the command line, and served by a fleet whose nodes download it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deadlines import READY_TIMEOUT_S
from hub_server import HubServer, serve_hub
from ray_nodes import RayNodes
from reference import Reference

from quire import Client, SamplingParams
from quire.cluster.cli.demo.server import ServerProcess

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

MODEL = "org/tiny-llama"
PROMPT = "The quick brown fox"
RunQuire = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def hub(
    make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HubServer]:
    """A hub for new processes, with an empty cache."""
    with serve_hub(HubServer({MODEL: make_model("llama")})) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield server


def test_download_command_prints_the_snapshot(hub: HubServer, run_quire: RunQuire) -> None:
    done = run_quire("download", MODEL)
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "model.safetensors").is_file()
    assert f"downloading {MODEL}: " in done.stderr
    assert run_quire("download", "org/other").returncode == 1


def test_fleet_serves_a_hub_model(hub: HubServer, make_model: Callable[..., Path]) -> None:
    with RayNodes({"CPU": 4}) as nodes, pytest.MonkeyPatch.context() as patch:
        for name, value in nodes.environment.items():
            patch.setenv(name, value)
        options = ("--num-kv-blocks", "64", "--tensor-parallel-size", "2")
        with ServerProcess(MODEL, "--address", nodes.address, *options) as server:
            server.wait_ready(READY_TIMEOUT_S)
            with Client(server.address) as client:
                output = client.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0.0))
    assert output.model == MODEL
    Reference(make_model("llama")).check_greedy_text(PROMPT, output.outputs[0].token_ids)
    # The two ranks are on one node.
    assert set(hub.num_gets.values()) == {1}
