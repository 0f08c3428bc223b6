"""Fleets whose nodes Ray's autoscaler adds and removes: every request finishes, with the right tokens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from fake_cloud import FakeCloud
from fleet_load import Load, ready, wait_for
from reference import Reference

from quire import Client, SamplingParams
from quire.cluster.cli.demo.server import ServerProcess
from quire.cluster.fleet.ray.local_cluster import attach

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

READY_TIMEOUT_S = 300.0
RunQuire = Callable[..., "subprocess.CompletedProcess[str]"]
PARAMS = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
PROMPTS = [f"Chapter {number}. It was a dark evening, and" for number in range(1, 9)]

# On the fake cloud a rank computes on the CPU; its GPU is only a Ray resource.
RANK = ("--device", "cpu", "--rank-resource", "GPU=1", "--num-kv-blocks", "256", "--drain-grace-s", "1")


@pytest.fixture(scope="module")
def reference(demo_model_dir: Path) -> Reference:
    return Reference(demo_model_dir)


@contextmanager
def fleet(cloud: FakeCloud, *options: str) -> Iterator[ServerProcess]:
    """Run `quire serve demo` on the fake cloud."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cloud.environment.items():
            patch.setenv(name, value)
        config = ("--autoscaling-config", str(cloud.config))
        server = ServerProcess("demo", "--address", cloud.address, *config, *RANK, *options)
    try:
        server.wait_ready(READY_TIMEOUT_S)
        yield server
    finally:
        server.close()


@pytest.fixture
def cloud() -> Iterator[FakeCloud]:
    """A head node without room for a replica, and up to three nodes with one GPU each."""
    with FakeCloud({"CPU": 1}, {"CPU": 2, "GPU": 1}, max_nodes=3) as started:
        yield started


def check(reference: Reference, answers: list[tuple[str, tuple[int, ...]]]) -> None:
    assert answers
    for prompt, answer in set(answers):
        assert len(answer) == PARAMS.max_tokens
        reference.check_greedy_text(prompt, answer)


def test_replicas_and_nodes_scale_with_load_from_zero_to_three_and_back(
    cloud: FakeCloud, reference: Reference
) -> None:
    options = (
        "--min-replicas", "0", "--max-replicas", "3", "--target-wait-s", "0.2", "--up-delay-s", "0",
        "--down-delay-s", "5", "--idle-timeout-s", "10", "--max-num-seqs", "4",
    )  # fmt: skip
    with fleet(cloud, *options) as server, Client(server.address, timeout_s=600) as client:
        assert client.is_ready()  # scaled to zero: a request starts a replica
        assert cloud.node_pids() == {}
        with Load(client, PROMPTS, PARAMS, num_threads=1) as light:
            wait_for(client, lambda status: len(ready(status)) == 1, READY_TIMEOUT_S)
        with Load(client, PROMPTS, PARAMS, num_threads=24) as heavy:
            wait_for(client, lambda status: len(ready(status)) == 3, READY_TIMEOUT_S)
            assert len(cloud.node_pids()) == 3
        with Load(client, PROMPTS, PARAMS, num_threads=1) as again:
            wait_for(client, lambda status: len(ready(status)) == 1, READY_TIMEOUT_S)
        wait_for(client, lambda status: not ready(status), READY_TIMEOUT_S)
        deadline = time.monotonic() + 120
        while cloud.node_pids():
            assert time.monotonic() < deadline, "the autoscaler keeps nodes without work"
            time.sleep(1)
        assert client.is_ready()
        check(reference, light.outputs + heavy.outputs + again.outputs)


def test_replica_that_fits_nowhere_reports_the_reason(
    cloud: FakeCloud, run_quire: RunQuire, reference: Reference
) -> None:
    with fleet(cloud) as server, Client(server.address) as client:
        done = run_quire(
            "deploy", "demo", "--served-model-name", "large", "--tensor-parallel-size", "4", *RANK, "--rank-resource",
            "GPU=2", "--target", server.address,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        status = wait_for(
            client, lambda status: any("waits for room" in each.problem for each in status.replicas), 120
        )
        (waiting,) = [each for each in status.replicas if each.model == "large"]
        assert "8 GPU" in waiting.problem
        assert "worker offers" in waiting.problem
        assert "max 3 nodes" in waiting.problem
        answer = client.generate(PROMPTS[0], PARAMS, model="demo")  # the other model is still served
        check(reference, [(PROMPTS[0], tuple(answer.outputs[0].token_ids))])
        shown = run_quire("status", "--target", server.address)
        assert shown.returncode == 1
        assert "waits for room" in shown.stdout.replace("\n", " ")
        assert run_quire("delete", "large", "--target", server.address).returncode == 0
        wait_for(client, lambda status: all(each.model == "demo" for each in status.deployments), 120)


def test_node_lost_while_the_fleet_grows_is_replaced(cloud: FakeCloud, reference: Reference) -> None:
    with (
        fleet(cloud, "--min-replicas", "2", "--max-replicas", "2") as server,
        Client(server.address) as client,
    ):
        with Load(client, PROMPTS, PARAMS, num_threads=4) as load:
            deadline = time.monotonic() + 120
            while len(nodes := cloud.node_pids()) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            os.kill(nodes[max(nodes)], signal.SIGKILL)  # the second node, as soon as it has started
            lost = max(nodes)
            wait_for(
                client,
                lambda status: (
                    len(ready(status)) == 2 and not any(lost in each.node_ids for each in ready(status))
                ),
                READY_TIMEOUT_S,
            )
        check(reference, load.outputs)


def test_replica_on_a_node_that_ray_drains_moves_under_load(cloud: FakeCloud, reference: Reference) -> None:
    with (
        fleet(cloud, "--min-replicas", "2", "--max-replicas", "2") as server,
        Client(server.address) as client,
    ):
        with Load(client, PROMPTS, PARAMS, num_threads=4) as load:
            status = wait_for(client, lambda status: len(ready(status)) == 2, READY_TIMEOUT_S)
            left = ready(status)[0].node_ids[0]
            command = [
                str(Path(sys.executable).parent / "ray"), "drain-node", "--address", cloud.address, "--node-id", left,
                "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot notice",
                "--deadline-remaining-seconds", "60",
            ]  # fmt: skip
            subprocess.run(command, env=cloud.environment, check=True, timeout=60, capture_output=True)
            wait_for(
                client,
                lambda status: (
                    len(ready(status)) == 2 and not any(left in each.node_ids for each in ready(status))
                ),
                READY_TIMEOUT_S,
            )
        check(reference, load.outputs)


def test_new_version_replaces_the_old_one_under_load(
    cloud: FakeCloud, run_quire: RunQuire, reference: Reference
) -> None:
    limits = ("--min-replicas", "2", "--max-replicas", "2")
    with fleet(cloud, *limits) as server, Client(server.address) as client:
        wait_for(client, lambda status: len(ready(status)) == 2, READY_TIMEOUT_S)
        with Load(client, PROMPTS, PARAMS, num_threads=4) as load:
            done = run_quire(
                "deploy", "demo", *RANK, *limits, "--weights-version", "2", "--target", server.address
            )
            assert done.returncode == 0, done.stderr
            version = done.stdout.split()[-1]
            wait_for(
                client, lambda s: [each.version for each in ready(s)] == [version] * 2, 2 * READY_TIMEOUT_S
            )
        check(reference, load.outputs)


def test_deleted_model_leaves_no_actor_and_no_placement_group(cloud: FakeCloud) -> None:
    with fleet(cloud) as server, Client(server.address) as client:
        client.delete("demo")
        wait_for(client, lambda status: not ready(status) and not status.deployments, 120)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
                patch.setenv(name, cloud.environment[name])
            with attach(cloud.address):
                deadline = time.monotonic() + 120
                while names := [name for name in ray.util.list_named_actors() if "replica" in name]:
                    assert time.monotonic() < deadline, names
                    time.sleep(0.2)
                groups = ray.util.placement_group_table().values()
                assert [group["state"] for group in groups if group["state"] != "REMOVED"] == []
