"""The canary: one token through all ranks of a replica, before anybody counts on it."""

from __future__ import annotations

import asyncio

import numpy as np

from ...proto.errors import ReplicaUnavailable, from_status
from ...proto.sampling import SamplingParams
from ...proto.stream import FinishReason
from ..requests.request import Request
from .client import ReplicaClient


async def run_canary(client: ReplicaClient, timeout_s: float) -> None:
    """Returns once a token has come through all ranks of the replica.

    Raises:
        QuireError: why none has, in time.
    """
    params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
    running = client.submit(Request("canary", np.zeros(1, np.int32), params))
    try:
        async with asyncio.timeout(timeout_s):
            async for _, news in running:
                if (finish := news.finish) is None:
                    continue
                if finish.reason is FinishReason.MOVED:
                    raise ReplicaUnavailable(f"replica {client.replica_id} drains")
                if finish.reason is FinishReason.ERROR:
                    raise from_status(finish.grpc_status, finish.error)
    except TimeoutError:
        raise ReplicaUnavailable(f"replica {client.replica_id} gave no token in {timeout_s:g} s") from None
    finally:
        running.abort()
