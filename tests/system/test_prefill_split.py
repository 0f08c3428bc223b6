"""Prefill and decode apart in real processes, of which each side is killed while prompts are split."""

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

PARAMS = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
# A step holds half of a prompt, so that the replicas measure how fast they compute prompts.
OPTIONS = (
    "--prefill-replicas", "1", "--decode-replicas", "1", "--num-kv-blocks", "512", "--drain-grace-s", "0.2",
    "--max-num-batched-tokens", "128", "--audit",
)  # fmt: skip

ROLES = ["decode", "prefill"]

RunQuire = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def server(nodes: RayNodes) -> Iterator[ServerProcess]:
    with fleet_server(nodes, *OPTIONS) as started:
        yield started


def both_ready(client: Client) -> FleetInfo:
    """Wait until a replica of each role is ready."""
    return wait_for(client, lambda s: roles(s) == ROLES, READY_TIMEOUT_S)


def roles(status: FleetInfo) -> list[str]:
    return sorted(replica.role for replica in ready(status))


def check(load: Load, reference: Reference) -> None:
    assert load.outputs
    for prompt, answer in load.outputs:
        assert len(answer) == PARAMS.max_tokens
        reference.check_greedy_text(prompt, answer)


def test_prompts_are_computed_by_one_replica_and_continued_by_another(
    server: ServerProcess, run_quire: RunQuire, demo_model_dir: Path
) -> None:
    with Client(server.address) as client:
        both_ready(client)
        with Load(client, new_prompts(), PARAMS, num_threads=4) as load:
            status = wait_for(client, lambda s: num_pulls(s) >= 3, READY_TIMEOUT_S)
        check(load, Reference(demo_model_dir))
        (reader,) = [replica for replica in status.replicas if replica.kv.num_kv_pulls]
        assert reader.role == "decode"
        shown = run_quire("status", "--target", server.address).stdout
        assert "prefill" in shown
        assert "from other replicas" in shown


@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.1])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_killed_side_costs_time_and_no_token(
    server: ServerProcess, demo_model_dir: Path, role: str, delay_s: float
) -> None:
    """Kill a rank of either side under load, some time after blocks were read: in a prompt, a read or a decode."""
    with Client(server.address) as client:
        before = num_pulls(both_ready(client))
        with Load(client, new_prompts(), PARAMS, num_threads=4) as load:
            status = wait_for(client, lambda s: num_pulls(s) > before and roles(s) == ROLES, READY_TIMEOUT_S)
            (victim,) = [replica.ranks[0].pid for replica in ready(status) if replica.role == role]
            time.sleep(delay_s)
            os.kill(victim, signal.SIGKILL)
            wait_for(client, lambda s: roles(s) == ROLES and victim not in rank_pids(s), READY_TIMEOUT_S)
        check(load, Reference(demo_model_dir))
