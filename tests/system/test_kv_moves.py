"""Requests that take their KV along between two replicas of real processes, of which each side is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deadlines import READY_TIMEOUT_S
from fleet_load import Load, new_prompts, num_pulls, rank_pids, ready, wait_for
from fleet_server import fleet_server
from ray_nodes import RayNodes
from reference import Reference

from quire import Client, FleetInfo, SamplingParams
from quire.cluster.cli.demo.server import ServerProcess

pytestmark = pytest.mark.cluster

PARAMS = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
OPTIONS = (
    "--min-replicas", "2", "--max-replicas", "2", "--num-kv-blocks", "512", "--drain-grace-s", "0.2",
    "--kv-transfer", "--audit",
)  # fmt: skip

# On a busy machine the rates that were measured may tell to compute the tokens of some drains again.
DRAINS_TIMEOUT_S = 600.0

RunQuire = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def server(nodes: RayNodes) -> Iterator[ServerProcess]:
    with fleet_server(nodes, *OPTIONS) as started:
        yield started


def drain_one(client: Client, server: ServerProcess, run_quire: RunQuire) -> str:
    """Drain a replica that runs sequences."""
    status = wait_for(
        client,
        lambda status: len(ready(status)) == 2 and any(each.queue.num_running for each in ready(status)),
        READY_TIMEOUT_S,
    )
    drained = next(each.replica_id for each in ready(status) if each.queue.num_running)
    done = run_quire("drain", drained, "--target", server.address)
    assert done.returncode == 0, done.stderr
    return drained


def await_successor(client: Client, drained: str) -> FleetInfo:
    return wait_for(
        client,
        lambda s: len(ready(s)) == 2 and drained not in [r.replica_id for r in ready(s)],
        READY_TIMEOUT_S,
    )


def check(load: Load, reference: Reference) -> None:
    assert load.outputs
    for prompt, answer in set(load.outputs):
        assert len(answer) == PARAMS.max_tokens
        reference.check_greedy_text(prompt, answer)


@pytest.mark.timeout(900)
def test_requests_of_a_drained_replica_bring_their_blocks(
    server: ServerProcess, run_quire: RunQuire, demo_model_dir: Path
) -> None:
    with Client(server.address) as client:
        with Load(client, new_prompts(), PARAMS, num_threads=4) as load:
            deadline = time.monotonic() + DRAINS_TIMEOUT_S
            while not num_pulls(status := await_successor(client, drain_one(client, server, run_quire))):
                assert time.monotonic() < deadline, "no move has brought its blocks"
        check(load, Reference(demo_model_dir))
        shown = run_quire("status", "--target", server.address)
        assert "from other replicas" in shown.stdout, shown.stdout
        assert sum(replica.kv.num_kv_pulled_tokens for replica in status.replicas) > 0


@pytest.mark.timeout(900)
def test_successor_of_a_drained_replica_reads_what_prompts_share(
    server: ServerProcess, run_quire: RunQuire, demo_model_dir: Path
) -> None:
    (tale,) = new_prompts(1)
    params = SamplingParams(max_tokens=4, temperature=0.0)
    with Client(server.address) as client:
        before = wait_for(client, lambda status: len(ready(status)) == 2, READY_TIMEOUT_S)
        hits = {replica.replica_id: replica.kv.prefix_hit_tokens for replica in ready(before)}
        for number in range(6):
            client.generate(f"{tale} traveler {number}", params)
        status = wait_for(
            client,
            lambda status: any(each.kv.prefix_hit_tokens > hits[each.replica_id] for each in ready(status)),
            READY_TIMEOUT_S,
        )
        (other,) = [
            each.replica_id for each in ready(status) if each.kv.prefix_hit_tokens == hits[each.replica_id]
        ]
        assert run_quire("drain", other, "--target", server.address).returncode == 0
        await_successor(client, other)
        wait_for(
            client,
            lambda status: any(
                each.replica_id not in hits and each.kv.num_kv_ahead_tokens for each in ready(status)
            ),
            READY_TIMEOUT_S,
        )


@pytest.mark.parametrize(
    "delay_s", [0.25, pytest.param(0.0, marks=pytest.mark.slow), pytest.param(0.5, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("side", ["lender", "reader"])
def test_killed_side_costs_time_and_no_token(
    server: ServerProcess, run_quire: RunQuire, demo_model_dir: Path, side: str, delay_s: float
) -> None:
    """Kill a rank of either side about when its sequences move: before, during and after the reads."""
    with Client(server.address) as client:
        before = wait_for(client, lambda status: len(ready(status)) == 2, READY_TIMEOUT_S)
        with Load(client, new_prompts(), PARAMS, num_threads=4) as load:
            drained = drain_one(client, server, run_quire)
            (victim,) = [
                replica.ranks[0].pid
                for replica in ready(before)
                if (replica.replica_id == drained) == (side == "lender")
            ]
            time.sleep(delay_s)
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                assert side == "lender"  # it has drained and ended
            await_successor(client, drained)
            wait_for(client, lambda status: victim not in rank_pids(status), READY_TIMEOUT_S)
        check(load, Reference(demo_model_dir))
