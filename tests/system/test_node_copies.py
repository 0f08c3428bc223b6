"""Replicas over nodes with caches of their own: one node reads the shared files, and the others read its copy."""

from __future__ import annotations

import logging
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import ray
from caller import Caller
from deadlines import READY_TIMEOUT_S
from fakes import submit
from ray_nodes import LOOPBACK, RayNodes
from reference import Reference

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.fleet.ray.launch_target import FleetLaunchTarget
from quire.cluster.fleet.ray.local_cluster import attach
from quire.cluster.fleet.replica.launch import launch_replica
from quire.proto.transport.network import CurveKeys

pytestmark = pytest.mark.cluster

NAMESPACE = "node-copies"
PROMPT = [5, 6, 7, 8, 9]
MEMORY = Path("/dev/shm")


@pytest.fixture
def caches(tmp_path: Path) -> Iterator[list[Path]]:
    """Return a cache for each of two nodes, on another disk than the model."""
    if not MEMORY.is_dir() or MEMORY.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("caches need another disk than that of the model")
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield [Path(folder) / name for name in ("near", "far")]


@pytest.fixture
def address(caches: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the address of a cluster of two nodes, each with room for a rank."""
    monkeypatch.setenv("QUIRE_WEIGHTS_CACHE", str(caches[0]))
    with ExitStack() as stack:
        nodes = stack.enter_context(RayNodes({"CPU": 3, "slot": 1}))
        nodes.add({"CPU": 2, "slot": 1}, LOOPBACK, ["env", f"QUIRE_WEIGHTS_CACHE={caches[1]}"])
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
            monkeypatch.setenv(name, nodes.environment[name])
        with attach(nodes.address, NAMESPACE):
            deadline = time.monotonic() + READY_TIMEOUT_S
            while sum(node["Alive"] for node in ray.nodes()) < 2:
                assert time.monotonic() < deadline, "the second node has not joined"
                time.sleep(0.1)
            yield nodes.address


def shares_read(caplog: pytest.LogCaptureFixture) -> list[int]:
    """Return the percentages of the files that nodes have read from the source."""
    return sorted(int(share) for share in re.findall(r"copied in .* (\d+) % from the source", caplog.text))


def check_tokens(endpoint: str, target: FleetLaunchTarget, model_dir: Path) -> None:
    with Caller(endpoint, target.keys) as caller:
        caller.send(submit(1, PROMPT, max_tokens=8, ignore_eos=True))
        output = caller.follow(1)[1]
    assert len(output.token_ids) == 8
    Reference(model_dir).check_greedy(PROMPT, output.token_ids)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_nodes_of_a_replica_read_the_shared_files_once(
    address: str,
    caches: list[Path],
    make_model: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
    num_stages: int,
) -> None:
    caplog.set_level(logging.INFO)
    model_dir, target = make_model("llama"), FleetLaunchTarget(CurveKeys.generate(), NAMESPACE, {"slot": 1.0})
    options = EngineOptions(
        str(model_dir),
        tensor_parallel_size=2 // num_stages,
        pipeline_parallel_size=num_stages,
        device="cpu",
        dtype="float32",
        num_kv_blocks=64,
    )
    replica_id = f"replica-{secrets.token_hex(3)}"
    with launch_replica(resolve(options, Machine.this()), replica_id, target) as replica:
        # The file is one piece.
        assert shares_read(caplog) == [0, 100]
        assert [len(list(cache.glob("*/model.safetensors"))) for cache in caches] == [1, 1]
        check_tokens(replica.address, target, model_dir)


def test_later_replica_reads_the_copy_of_an_earlier_one(
    address: str, caches: list[Path], make_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model_dir, target = make_model("llama"), FleetLaunchTarget(CurveKeys.generate(), NAMESPACE, {"slot": 1.0})
    config = resolve(
        EngineOptions(str(model_dir), device="cpu", dtype="float32", num_kv_blocks=64), Machine.this()
    )
    with (
        launch_replica(config, "one", target),
        launch_replica(config, "two", target, begin_load=lambda: ["gone", "one"]) as two,
    ):
        assert shares_read(caplog) == [0, 100]
        check_tokens(two.address, target, model_dir)
