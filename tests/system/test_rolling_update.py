"""Gateways and replicas of neighboring releases serve together, both ways round.

The earlier release is a commit of this repository, run from its own source in a process of its own. A change of
`stream.VERSION` ends the compatibility: before the first release of quire set BASELINE to a commit with the new
version, afterwards it needs a new major version.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
from gateway_process import peer_process
from local_replica import DEADLINE_S, local_replica
from local_server import local_config, local_gateway

from quire import Client, CompletionOutput, SamplingParams, Timings
from quire.cluster.fleet.replica.client import ReplicaClient

ROOT = Path(__file__).parents[2]
# The first commit whose messages a later release understands.
BASELINE = "70bfff5b35a3351dfc711bec1f52f541bab15050"
FOLDERS = ("proto", "kernels", "worker", "scheduler", "cluster")

pytestmark = pytest.mark.slow

REQUESTS = (
    ("The quick brown fox", SamplingParams(max_tokens=12, temperature=0.0)),
    ("The quick brown fox", SamplingParams(max_tokens=6, n=2, seed=3, logprobs=2)),
    ("Once upon a time", SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=1)),
    ("Once upon a time", SamplingParams(max_tokens=8, seed=1, logit_bias={5: 2.0}, stop=("never",))),
    ("Once", SamplingParams(max_tokens=5, beam_width=2, n=2)),
)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the source of the earlier release."""
    folder = tmp_path_factory.mktemp("baseline")
    names = (*FOLDERS, "__init__.py", "py.typed", "tests/support")
    archive = subprocess.run(["git", "archive", BASELINE, *names], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"the repository's history is not here: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as content:
        content.extractall(folder / "tree", filter="data")
    (folder / "quire").symlink_to("tree")
    return folder


@contextmanager
def peer(baseline: Path, *arguments: str) -> Iterator[str]:
    """Run one side with the earlier release, and yield its address."""
    support = baseline / "tree" / "tests" / "support"
    path = f"{baseline}{os.pathsep}{support}"
    with peer_process(path, support / "version_peer.py", *arguments) as (address, _):
        yield address


def outputs(target: str) -> list[tuple[CompletionOutput, ...]]:
    """Return the outputs of all requests, without their times."""
    with Client(target) as client:
        results = [client.generate(prompt, params).outputs for prompt, params in REQUESTS]
        (status,) = client.status()
        assert status.num_computed_tokens > 0
        assert client.block_map(status.replica_id).num_blocks > 0
    return [tuple(replace(output, timings=Timings()) for output in result) for result in results]


async def outputs_of_gateway(model: Path, endpoint: str) -> list[tuple[CompletionOutput, ...]]:
    replica = ReplicaClient(endpoint, "replica-0", heartbeat_s=0.1)
    async with local_gateway(local_config(model), replica) as servers:
        await asyncio.wait_for(servers.gateway.wait_ready(), DEADLINE_S)
        return await asyncio.to_thread(outputs, servers.target)


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Path:
    return make_model("llama")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[CompletionOutput, ...]]:
    """The outputs of this release alone."""
    with local_replica(local_config(model)) as replica:
        return asyncio.run(outputs_of_gateway(model, replica.address))


def test_gateway_serves_replica_of_earlier_release(
    baseline: Path, model: Path, expected: list[tuple[CompletionOutput, ...]]
) -> None:
    with peer(baseline, "replica", str(model)) as endpoint:
        assert asyncio.run(outputs_of_gateway(model, endpoint)) == expected


def test_gateway_of_earlier_release_serves_replica(
    baseline: Path, model: Path, expected: list[tuple[CompletionOutput, ...]]
) -> None:
    with (
        local_replica(local_config(model)) as replica,
        peer(baseline, "gateway", str(model), replica.address) as target,
    ):
        assert outputs(target) == expected
