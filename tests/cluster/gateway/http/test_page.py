"""The operator's page over HTTP: its files, its events, who may see them, and their bounds."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from deadlines import CALL_TIMEOUT_S
from local_server import ThreadedServer, threaded_server

from quire.cluster.client.wire.tokens import Role, Token, TokenSet
from quire.cluster.gateway.access.security import Security
from quire.cluster.gateway.admin.status import block_map
from quire.cluster.gateway.http import page_feed
from quire.cluster.gateway.http.endpoints.pages import PAGE_FILES
from quire.cluster.gateway.http.page_feed import PageFeed
from quire.cluster.os_utils.watched_file import constant
from quire.proto.errors import Overloaded


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let frames wait for the map of a replica whose thread waits for a processor."""
    monkeypatch.setattr(page_feed, "BLOCK_MAP_TIMEOUT_S", CALL_TIMEOUT_S)


@contextmanager
def frames(http: httpx.Client, replica: str = "", **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    with http.stream("GET", "/ui/events", params={"replica": replica}, headers=headers) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        yield (json.loads(line.removeprefix("data: ")) for line in lines if line)


def test_page_loads_nothing_from_elsewhere(http: httpx.Client) -> None:
    for path in PAGE_FILES:
        response = http.get(path)
        assert response.status_code == 200
        assert "default-src 'none'" in response.headers["content-security-policy"]
        text = response.text.replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, path
        assert "innerHTML" not in text, path
    for link in re.findall(r'(?:href|src)="(ui/[^"#]+)', http.get("/").text):
        assert f"/{link}" in PAGE_FILES


def test_frame_has_the_replica_its_traffic_and_its_blocks(http: httpx.Client) -> None:
    with frames(http, "replica-0") as shown:
        frame = next(shown)
    (replica,) = frame["fleet"]["replicas"]
    assert (replica["replica_id"], replica["ready"]) == ("replica-0", True)
    assert [traffic["model"] for traffic in frame["fleet"]["traffic"]] == ["tiny"]
    blocks = frame["blocks"]
    assert len(blocks["states"]) == len(blocks["rows"]) == blocks["num_blocks"] == 63
    assert set(blocks["states"]) <= set("01234")


def test_frame_without_a_map_says_why(http: httpx.Client) -> None:
    with frames(http, "replica-9") as shown:
        assert "no replica of this server" in next(shown)["blocks"]["problem"]
    with frames(http) as shown:
        assert next(shown)["blocks"] is None


def test_viewers_share_the_map_that_a_replica_makes(
    server: ThreadedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    async def counted(services: Any, replica_id: str, timeout_s: float) -> Any:
        made.append(replica_id)
        return await block_map(services, replica_id, timeout_s)

    async def look() -> None:
        feed = PageFeed(server.server.services)
        first, second = (feed.events("replica-0") for _ in range(2))
        assert await anext(first) == await anext(second)

    monkeypatch.setattr(page_feed, "block_map", counted)
    monkeypatch.setattr(page_feed, "FRAME_S", 3600.0)  # the first frame stays the latest
    server.run(look())
    assert made == ["replica-0"]


def test_too_many_viewers_are_refused(server: ThreadedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_feed, "MAX_VIEWERS", 1)

    async def look() -> None:
        feed = PageFeed(server.server.services)
        shown = cast(AsyncGenerator[bytes, None], feed.events(""))
        await anext(shown)
        with pytest.raises(Overloaded, match="1 pages are open already"):
            feed.check_capacity()
        await shown.aclose()
        feed.check_capacity()

    server.run(look())


def test_page_is_open_and_its_events_need_an_operator(make_model: Callable[..., Path]) -> None:
    operator = Token.of("sesame", roles=frozenset({Role.OPERATOR}))
    tokens = TokenSet([operator, Token.of("gauge", roles=frozenset({Role.METRICS}))])
    security = Security(tokens=constant(tokens))
    with (
        threaded_server(make_model("llama"), security=security, ready=False) as server,
        httpx.Client(base_url=server.url, timeout=CALL_TIMEOUT_S) as http,
    ):
        assert http.get("/").status_code == 200
        assert http.get("/ui/events").status_code == 401
        assert http.get("/ui/events", headers={"authorization": "Bearer gauge"}).status_code == 403
        with frames(http, authorization="Bearer sesame") as shown:
            assert next(shown)["fleet"]["replicas"]


def test_server_stops_at_once_although_a_page_is_open(make_model: Callable[..., Path]) -> None:
    with (
        threaded_server(make_model("llama"), ready=False) as server,
        httpx.Client(base_url=server.url, timeout=CALL_TIMEOUT_S) as http,
        frames(http) as shown,
    ):
        next(shown)
        assert server.server.http is not None
        server.run(server.server.http.stop(3600.0))
        assert list(shown) == []
