"""Fixture `http`: one HTTP server with a tiny model for all tests of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from local_server import ThreadedServer, threaded_server


@pytest.fixture(scope="module")
def server(make_model: Callable[..., Path]) -> Iterator[ThreadedServer]:
    with threaded_server(make_model("llama")) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: ThreadedServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
