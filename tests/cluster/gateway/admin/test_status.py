"""Status for operators over gRPC: asked for, latest known, traffic and the map of blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from local_server import local_server
from serving import DEADLINE_S, ENDLESS, PROMPT, eventually, first_delta

from quire import AsyncClient
from quire.cluster.gateway.admin.status import STATUS_TIMEOUT_S
from quire.cluster.gateway.grpc.admin import BLOCK_MAP_TIMEOUT_S
from quire.proto.block_map import BlockState
from quire.proto.errors import InvalidRequest, ReplicaUnavailable


async def test_status_shows_replica_traffic_and_blocks(make_model: Callable[..., Path]) -> None:
    async with local_server(make_model("llama")) as server, AsyncClient(server.target) as client:
        server.services.monitor.sample()
        server.brake.slow_down()
        events = client.generate_stream(PROMPT, ENDLESS, request_id="mine")
        await first_delta(events)
        server.services.monitor.sample()
        await server.replica.status(DEADLINE_S)  # a late one would be left out of the next line
        current = await client.fleet()
        (replica,) = current.replicas
        assert (replica.ready, replica.queue.num_running) == (True, 1)
        assert replica.num_computed_tokens > 0
        assert replica.busy_s > 0
        (traffic,) = current.traffic
        assert (traffic.model, traffic.num_open, traffic.num_unplaced) == ("tiny", 1, 0)
        assert traffic.generated_tokens_per_s > 0
        assert traffic.first_token.p50_s is not None
        blocks = await client.block_map("replica-0")
        (sequence,) = blocks.sequences
        assert sequence.request_id == "mine"
        assert blocks.states.count(BlockState.HELD) == sequence.num_blocks == blocks.rows.count(sequence.row)
        with pytest.raises(InvalidRequest, match="'replica-9', which is no replica of this server"):
            await client.block_map("replica-9")
        await events.aclose()


async def test_latest_status_is_returned_while_the_replica_hangs(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert STATUS_TIMEOUT_S < 0.5
    monkeypatch.setattr("quire.cluster.gateway.grpc.admin.BLOCK_MAP_TIMEOUT_S", BLOCK_MAP_TIMEOUT_S / 30)
    async with local_server(make_model("llama")) as server, AsyncClient(server.target) as client:
        server.brake.hold()
        events = client.generate_stream(PROMPT, ENDLESS)

        async def is_silent() -> bool:
            (replica,) = (await client.fleet(cached=True)).replicas
            return replica.silence_s > 0.5  # the status is due every 0.1 s

        await eventually(is_silent)
        (replica,) = (await client.fleet()).replicas  # asks the replica, for STATUS_TIMEOUT_S
        assert "answer" in replica.problem
        assert replica.silence_s > 0.5
        with pytest.raises(ReplicaUnavailable, match="did not answer a status query"):
            await client.block_map("replica-0")
        server.brake.release()
        await events.aclose()
