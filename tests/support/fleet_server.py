"""fleet_server: a gateway whose fleet runs on a Ray cluster of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from deadlines import READY_TIMEOUT_S
from ray_nodes import RayNodes

from quire.cluster.cli.demo.server import ServerProcess


@contextmanager
def fleet_server(nodes: RayNodes, *options: str) -> Iterator[ServerProcess]:
    """Serve the demo model with a fleet; yield the gateway, which must end well unless the block kills it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in nodes.environment.items():
            patch.setenv(name, value)
        server = ServerProcess("demo", "--address", nodes.address, *options)
    try:
        server.wait_ready(READY_TIMEOUT_S)
        yield server
        status = server.process.poll()
        assert status is not None or server.stop() == 0, server.log
    finally:
        server.close()
