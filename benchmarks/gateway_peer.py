"""Another gateway of a replica: runs a long request and prints a line with its first token.

    python -m benchmarks.gateway_peer ENDPOINT REPLICA_ID

It ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.text.requests.request import Request
from quire.proto.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=900, temperature=0.0, seed=0, ignore_eos=True)


async def main(endpoint: str, replica_id: str) -> None:
    client = ReplicaClient(endpoint, replica_id)
    client.start()
    request = client.submit(Request("peer", np.zeros(1, np.int32), PARAMS))
    try:
        async for _, update in request:
            if update.token_ids:
                print("running", flush=True)
                break
        await asyncio.to_thread(sys.stdin.read)
    finally:
        request.abort()
        await client.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
