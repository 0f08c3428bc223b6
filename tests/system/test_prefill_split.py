"""Prefill and decode apart in real processes, of which each side is killed while prompts are split."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import pytest
from deadlines import READY_TIMEOUT_S
from fleet_load import Load, ready, wait_for
from ray_nodes import RayNodes
from reference import Reference

from quire import Client, FleetInfo, SamplingParams
from quire.cluster.cli.demo.server import ServerProcess

pytestmark = pytest.mark.cluster

TEXT = " ".join(
    f"The {number}th traveler came to the inn in the evening, and asked for a room." for number in range(12)
)
NUM_CLIENTS, NUM_PROMPTS = 4, 500
PARAMS = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
# A step holds half of a prompt, so that the replicas measure how fast they compute prompts.
OPTIONS = (
    "--prefill-replicas", "1", "--decode-replicas", "1", "--num-kv-blocks", "512", "--drain-grace-s", "0.2",
    "--max-num-batched-tokens", "128", "--audit",
)  # fmt: skip

RunQuire = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with RayNodes({"CPU": 8}) as started:
        yield started


@pytest.fixture(scope="module")
def server(nodes: RayNodes) -> Iterator[ServerProcess]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in nodes.environment.items():
            patch.setenv(name, value)
        server = ServerProcess("demo", "--address", nodes.address, *OPTIONS)
    try:
        server.wait_ready(READY_TIMEOUT_S)
        yield server
        assert server.stop(60.0) == 0, server.log
    finally:
        server.close()


def num_pulls(status: FleetInfo) -> int:
    return sum(replica.kv.num_kv_pulls for replica in status.replicas)


def both_ready(client: Client) -> FleetInfo:
    """Wait until a replica of each role is ready."""
    return wait_for(
        client, lambda s: sorted(r.role for r in ready(s)) == ["decode", "prefill"], READY_TIMEOUT_S
    )


_numbers = count()


@contextmanager
def many_clients(client: Client) -> Iterator[list[Load]]:
    """Send prompts from several threads during the block; each is sent once, so that no replica has its prefix."""
    with ExitStack() as stack:
        loads = []
        for _ in range(NUM_CLIENTS):
            numbers = [next(_numbers) for _ in range(NUM_PROMPTS)]
            prompts = [f"{number} chapters. {TEXT} It was a dark evening, and" for number in numbers]
            loads.append(stack.enter_context(Load(client, prompts, PARAMS, num_threads=1)))
        yield loads


def check(loads: list[Load], reference: Reference) -> None:
    outputs = [output for load in loads for output in load.outputs]
    assert len(outputs) >= NUM_CLIENTS
    for prompt, answer in outputs:
        assert len(answer) == PARAMS.max_tokens
        reference.check_greedy_text(prompt, answer)


def test_prompts_are_computed_by_one_replica_and_continued_by_another(
    server: ServerProcess, run_quire: RunQuire, demo_model_dir: Path
) -> None:
    with Client(server.address) as client:
        both_ready(client)
        with many_clients(client) as loads:
            status = wait_for(client, lambda s: num_pulls(s) >= 3, 120.0)
        check(loads, Reference(demo_model_dir))
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
        with many_clients(client) as loads:
            status = wait_for(client, lambda s: num_pulls(s) > before, 120.0)
            (victim,) = [replica.ranks[0].pid for replica in ready(status) if replica.role == role]
            time.sleep(delay_s)
            os.kill(victim, signal.SIGKILL)
            time.sleep(2.0)
            both_ready(client)
        check(loads, Reference(demo_model_dir))
