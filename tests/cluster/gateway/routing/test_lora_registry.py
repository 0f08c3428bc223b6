"""Adapters in a fleet: every replica learns them, and requests keep theirs when they move."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from adapters import merge, write_adapter
from local_replica import DEADLINE_S, LocalReplica, local_replica
from local_server import local_config
from reference import Reference

from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.gateway.routing.replica_pool import ReplicaPool
from quire.cluster.text.requests.request import Request
from quire.proto.errors import LoraLoadError
from quire.proto.lora import MAX_REGISTERED_LORAS, LoraReference, merge_references
from quire.proto.sampling import SamplingParams
from quire.proto.stream import Drain

PROMPT = [5, 9, 11, 40, 7, 3, 2, 8]
NUM_TOKENS = 48
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, seed=1)


@dataclass(frozen=True)
class Adapted:
    """A model, one of its adapters, and the tokens of the merged model."""

    model: Path
    path: str
    expected: list[int]


@pytest.fixture(scope="module")
def adapted(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    model, root = make_model("llama", seed=7), tmp_path_factory.mktemp("adapters")
    path = write_adapter(root / "sql", model, seed=1)
    merged = merge(root / "merged", model, path)
    return Adapted(model, str(path), Reference(merged).generate(PROMPT, NUM_TOKENS))


@pytest.fixture
def replicas(adapted: Adapted) -> Iterator[list[LocalReplica]]:
    """Two replicas of the model."""
    config = local_config(adapted.model, enable_lora=True, max_loras=2)
    with ExitStack() as opened:
        yield [opened.enter_context(local_replica(config, f"replica-{index}")) for index in range(2)]


def connect(replica: LocalReplica, replica_id: str) -> ReplicaClient:
    client = ReplicaClient(replica.address, replica_id, heartbeat_s=0.1)
    client.start()
    return client


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


def names_of(client: ReplicaClient) -> dict[str, str]:
    """Return name |-> path in the replica's latest status."""
    status = client.latest_status
    return {} if status is None else {each.name: each.path for each in status.loras}


async def test_request_keeps_its_adapter_when_it_moves_to_a_replica_that_joined_later(
    adapted: Adapted, replicas: list[LocalReplica]
) -> None:
    pool = ReplicaPool("tiny", 16)
    pool.adapters.configure(replicas[0].config.lora)
    try:
        first, second = (connect(each, f"replica-{index}") for index, each in enumerate(replicas))
        pool.add(first)
        await until(lambda: pool.is_ready)
        await pool.adapters.load([first], "sql", adapted.path)
        reference = pool.adapters.find("sql")
        replicas[0].brake.slow_down()
        running = pool.submit(Request("mine", np.array(PROMPT, np.int32), GREEDY, lora=reference))
        tokens: list[int] = []
        async with asyncio.timeout(DEADLINE_S):
            async for _, update in running:
                tokens += update.token_ids
                if tokens and "replica-1" not in pool.clients:
                    pool.add(second)
                    first.send(Drain(0.0))
        assert tokens == adapted.expected
        await until(lambda: names_of(second) == {"sql": adapted.path})
        pool.adapters.unload(pool.clients.values(), "sql")
        await until(lambda: names_of(second) == {"sql": ""})
    finally:
        await pool.close()


async def test_second_gateway_learns_adapters_from_replicas(
    adapted: Adapted, replicas: list[LocalReplica], tmp_path: Path
) -> None:
    pools = [ReplicaPool("tiny", 16) for _ in range(2)]
    try:
        for pool in pools:
            pool.adapters.configure(replicas[0].config.lora)
            for index, replica in enumerate(replicas):
                pool.add(connect(replica, f"replica-{index}"))
        await until(lambda: all(pool.is_ready for pool in pools))
        ours, theirs = (pool.adapters for pool in pools)
        await ours.load(pools[0].clients.values(), "sql", adapted.path)
        await until(lambda: theirs.find("sql") is not None)
        assert theirs.find("sql") == ours.find("sql")
        with pytest.raises(LoraLoadError, match="no such directory"):
            await theirs.load(pools[1].clients.values(), "sql", str(tmp_path / "gone"), replace=True)
        await until(
            lambda: all(names_of(each).get("sql") == adapted.path for each in pools[1].clients.values())
        )
        theirs.unload(pools[1].clients.values(), "sql")
        await until(lambda: ours.find("sql") is None)
    finally:
        for pool in pools:
            await pool.close()


async def test_adapter_can_be_unloaded_after_the_clock_went_back(
    adapted: Adapted, replicas: list[LocalReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ReplicaPool("tiny", 16)
    pool.adapters.configure(replicas[0].config.lora)
    pool.add(connect(replicas[0], "replica-0"))
    try:
        await until(lambda: pool.is_ready)
        await pool.adapters.load(pool.clients.values(), "sql", adapted.path)
        monkeypatch.setattr("time.time_ns", lambda: 1)
        pool.adapters.unload(pool.clients.values(), "sql")
        assert pool.adapters.find("sql") is None
        await pool.adapters.load(pool.clients.values(), "sql", adapted.path)
        assert pool.adapters.find("sql") is not None
    finally:
        await pool.close()


def test_later_version_of_a_name_wins_in_any_order() -> None:
    entries = [LoraReference("a", f"/{version}", version) for version in ("3", "1", "2")]
    entries.append(LoraReference("b", "", "9"))
    for order in (entries, entries[::-1]):
        registry: dict[str, LoraReference] = {}
        merge_references(registry, order)
        assert registry["a"].path == "/3"
        assert merge_references(registry, order) == []


def test_entries_of_unloaded_adapters_are_bounded() -> None:
    registry: dict[str, LoraReference] = {}
    merge_references(registry, [LoraReference("kept", "/kept", "0")])
    count = MAX_REGISTERED_LORAS + 10
    merge_references(registry, [LoraReference(f"{index}", "", f"{index:05}") for index in range(count)])
    assert len(registry) == MAX_REGISTERED_LORAS + 1
    assert "kept" in registry
    assert "9" not in registry
