"""One side of a rolling update, as a process with the quire of its PYTHONPATH.

    python version_peer.py replica MODEL_DIR             prints the endpoint of a replica
    python version_peer.py gateway MODEL_DIR ENDPOINT    prints the HOST:PORT of a gateway of the replica

It ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from local_replica import DEADLINE_S, local_replica
from local_server import local_config, local_gateway

from quire.cluster.fleet.replica.client import ReplicaClient


def run_replica(model_dir: Path) -> None:
    with local_replica(local_config(model_dir)) as replica:
        print(replica.address, flush=True)
        sys.stdin.read()


async def run_gateway(model_dir: Path, endpoint: str) -> None:
    replica = ReplicaClient(endpoint, "replica-0", heartbeat_s=0.1)
    async with local_gateway(local_config(model_dir), replica) as servers:
        await asyncio.wait_for(servers.gateway.wait_ready(), DEADLINE_S)
        print(servers.target, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    role, directory, *address = sys.argv[1:]
    if role == "replica":
        run_replica(Path(directory))
    else:
        asyncio.run(run_gateway(Path(directory), *address))
