"""A fleet on a real Ray cluster: draining, an update, and a killed controller, gateway and scheduler."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deadlines import READY_TIMEOUT_S
from fleet_load import Load, ready, wait_for
from fleet_server import fleet_server
from ray_nodes import RayNodes
from reference import Reference
from server_processes import pid_of, processes_with

from quire import Client, SamplingParams
from quire.cluster.cli.demo.server import ServerProcess
from quire.cluster.text.requests.outputs import CompletionDelta, StreamEvent

pytestmark = pytest.mark.cluster

PROMPTS = [f"Chapter {number}. It was a dark evening, and" for number in range(1, 9)]
PARAMS = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)

RunQuire = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def server(nodes: RayNodes) -> Iterator[ServerProcess]:
    """A gateway with two replicas."""
    with fleet_server(nodes, *OPTIONS) as started:
        yield started


OPTIONS = ("--min-replicas", "2", "--max-replicas", "2", "--num-kv-blocks", "256", "--drain-grace-s", "0.5")


def test_a_fleet_serves_drains_updates_and_outlives_its_controller(
    nodes: RayNodes, server: ServerProcess, run_quire: RunQuire, demo_model_dir: Path
) -> None:
    with Client(server.address) as client:
        first = wait_for(client, lambda status: len(ready(status)) == 2, READY_TIMEOUT_S)
        with Load(client, PROMPTS, PARAMS, num_threads=2) as load:
            drained = ready(first)[0].replica_id
            done = run_quire("drain", drained[:-2], "--target", server.address)
            assert done.returncode == 0, done.stderr
            assert drained in done.stdout
            wait_for(
                client,
                lambda s: len(ready(s)) == 2 and drained not in [r.replica_id for r in ready(s)],
                READY_TIMEOUT_S,
            )

            os.kill(pid_of("ray::FleetController", nodes.head_pid), signal.SIGKILL)
            # The gateway keeps serving from its last state.
            known = wait_for(client, lambda s: len(ready(s)) == 2, READY_TIMEOUT_S)
            kept = {replica.replica_id for replica in ready(known)}
            done = run_quire("deploy", "demo", *OPTIONS, "--weights-version", "2", "--target", server.address)
            deadline = time.monotonic() + READY_TIMEOUT_S
            while done.returncode and time.monotonic() < deadline:  # the controller is restarting
                assert "controller" in done.stderr
                done = run_quire(
                    "deploy", "demo", *OPTIONS, "--weights-version", "2", "--target", server.address
                )
            assert done.returncode == 0, done.stderr
            version = done.stdout.split()[-1]
            status = wait_for(
                client, lambda s: [r.version for r in ready(s)] == [version] * 2, READY_TIMEOUT_S
            )
            states = {replica.replica_id: replica.state for replica in status.replicas}
            assert all(states.get(name, "stopped") in ("stopped", "draining") for name in kept)
        reference = Reference(demo_model_dir)
        assert load.outputs
        for prompt, answer in set(load.outputs):
            assert len(answer) == PARAMS.max_tokens
            reference.check_greedy_text(prompt, answer)
        shown = run_quire("status", "--target", server.address)
        assert shown.returncode == 0, shown.stdout
        assert "2 of 2" in shown.stdout
        assert version in shown.stdout


def test_streams_survive_a_killed_gateway_and_a_killed_scheduler(
    nodes: RayNodes, server: ServerProcess, demo_model_dir: Path
) -> None:
    """The client has two gateways, and no other way to the replicas."""
    with (
        fleet_server(nodes, *OPTIONS) as doomed,
        Client(f"{doomed.address},{server.address}") as client,
        Load(client, PROMPTS, PARAMS, num_threads=2) as load,
    ):
        stream = client.generate_stream(PROMPTS[0], PARAMS)
        tokens = first_tokens(stream)
        doomed.process.kill()
        doomed.process.wait()
        tokens += all_tokens(stream)
        stream = client.generate_stream(PROMPTS[1], PARAMS)
        others = first_tokens(stream)
        processes_with("ray::SchedulerActor", nodes.head_pid)[0].kill()
        others += all_tokens(stream)
        # The scheduler has a successor, or the replica if its ranks did not answer in time.
        wait_for(client, lambda s: len(ready(s)) == 2, READY_TIMEOUT_S)
    reference = Reference(demo_model_dir)
    outputs = {*load.outputs, (PROMPTS[0], tuple(tokens)), (PROMPTS[1], tuple(others))}
    for prompt, answer in outputs:
        assert len(answer) == PARAMS.max_tokens
        reference.check_greedy_text(prompt, answer)


def first_tokens(stream: Iterator[StreamEvent]) -> list[int]:
    """Return the tokens of the first delta."""
    return next(event.token_ids for event in stream if isinstance(event, CompletionDelta))


def all_tokens(stream: Iterator[StreamEvent]) -> list[int]:
    return [token for event in stream if isinstance(event, CompletionDelta) for token in event.token_ids]
