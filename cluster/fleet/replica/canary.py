"""The canary: a request for one token, or one vector, that a new replica must serve before it takes others.

A replica that refuses it, since its queue is full, proves itself by computing steps for others.
"""

from __future__ import annotations

import asyncio

import numpy as np

from ....proto.errors import Overloaded, ReplicaUnavailable
from ....proto.pooling import PoolingParams
from ....proto.sampling import SamplingParams
from ....proto.stream import FinishReason
from ...text.requests.request import Request
from .client import ReplicaClient


async def run_canary(client: ReplicaClient, timeout_s: float) -> None:
    """Wait until the replica, with all its ranks, has generated one token, or has pooled one if it generates none.

    Raises:
        QuireError: the replica failed, drains, or generated no token in time; says which.
    """
    try:
        async with asyncio.timeout(timeout_s):
            try:
                await _generate_token(client)
            except Overloaded:
                await _wait_for_step(client, timeout_s)
    except TimeoutError:
        raise ReplicaUnavailable(
            f"replica {client.replica_id} generated no token in {timeout_s:g} s"
        ) from None


async def _generate_token(client: ReplicaClient) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
    status = client.latest_status
    pooling = None if status is None or status.generates else PoolingParams()
    request = client.submit(Request("canary", np.zeros(1, np.int32), params, pooling=pooling))
    try:
        async for _, update in request:
            if (finish := update.finish) is None:
                continue
            if finish.reason is FinishReason.MOVED:
                raise ReplicaUnavailable(f"replica {client.replica_id} drains")
            if finish.reason is FinishReason.ERROR:
                raise finish.to_error()
    finally:
        request.abort()


async def _wait_for_step(client: ReplicaClient, timeout_s: float) -> None:
    """Return once the replica has computed a step from now on."""
    first = await client.next_status(timeout_s)
    while (await client.next_status(timeout_s)).num_steps <= first.num_steps:
        pass
