"""Fixtures: one HTTP server with a tiny model for all tests of a module, and its clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from chat_model import PARSERS, chat_model
from local_server import ThreadedServer, threaded_server


@pytest.fixture(scope="module")
def server(
    make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ThreadedServer]:
    """A server whose model has a chat template, tool calls and reasoning."""
    model = chat_model(make_model("llama"), tmp_path_factory.mktemp("model"))
    with threaded_server(model, **PARSERS) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: ThreadedServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def blocks_are_free_after_each_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """No request of a test may leave a sequence, a block or a part of its scripted output behind."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        server.wait_until_free()
        server.server.script.clear()
