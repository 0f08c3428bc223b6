"""Canaries of replicas whose queue is full."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from local_replica import local_replica
from local_server import local_config
from serving import DEADLINE_S

from quire.cluster.fleet.replica.canary import run_canary
from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.text.requests.request import Request
from quire.proto.errors import Overloaded, ReplicaUnavailable
from quire.proto.sampling import SamplingParams

LONG = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True, seed=0)


def long_request() -> Request:
    return Request("long", np.arange(1, 9, dtype=np.int32), LONG)


async def fill(client: ReplicaClient) -> None:
    """Submit requests until the replica refuses one."""
    client.start()
    await client.wait_until_healthy()
    await anext(aiter(client.submit(long_request())))  # it runs
    client.submit(long_request())  # it waits
    async for _, update in client.submit(long_request()):
        assert update.finish is not None
        assert isinstance(update.finish.to_error(), Overloaded)


@pytest.mark.parametrize("computes", [True, False])
async def test_replica_that_refuses_the_canary_is_proved_by_its_steps(
    make_model: Callable[..., Path], computes: bool
) -> None:
    config = local_config(make_model("llama"), max_num_seqs=1, max_queue_len=1)
    with local_replica(config) as replica:
        client = ReplicaClient(replica.address, "replica-0", heartbeat_s=0.05)
        replica.brake.slow_down()  # so that the requests do not end
        try:
            await fill(client)
            if computes:
                await run_canary(client, DEADLINE_S)
                assert client.num_running == 2, "the requests ended: the canary may have been served"
            else:
                replica.brake.hold()
                with pytest.raises(ReplicaUnavailable):
                    await run_canary(client, 0.5)
        finally:
            replica.brake.release()
            await client.close()
