"""The operator's page in headless Chromium."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, chromium
from local_server import ThreadedServer, threaded_server
from serving import ENDLESS, PROMPT, drain

from quire import AsyncClient

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: chromium)"),
]

CONNECTION = "document.getElementById('connection').textContent"
REQUESTS = "[...document.querySelectorAll('#sequences td.id')].map((cell) => cell.textContent)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture(scope="module")
def requests(server: ThreadedServer) -> Iterator[None]:
    """Keep requests running, one after the other; a repeated id would return the first one's output."""

    async def keep_running() -> None:
        async with AsyncClient(server.server.target) as client:
            for number in itertools.count():
                await drain(client.generate_stream(PROMPT, ENDLESS, request_id=f"my-request-{number}"))

    running = asyncio.run_coroutine_threadsafe(keep_running(), server.loop)
    yield
    running.cancel()


@pytest.mark.parametrize("dark", [False, True])
def test_page_shows_replica_requests_and_blocks(
    browser: Browser, server: ThreadedServer, requests: None, dark: bool
) -> None:
    browser.open(server.url, dark=dark)
    browser.wait_for(f"{CONNECTION}.startsWith('live')")
    browser.wait_for("document.querySelector('#replicas h2').textContent === 'replica-0'")
    assert browser.evaluate("document.querySelector('#models h2').textContent") == "tiny"
    assert browser.evaluate("document.querySelector('#replicas .state').textContent") == "ready"
    browser.wait_for("document.querySelectorAll('#legend li').length === 5")
    counts = browser.evaluate("[...document.querySelectorAll('#legend li')].map((item) => item.textContent)")
    assert sum(int(text.split()[-1]) for text in counts) == 63
    pixels = "document.querySelector('#cells canvas').getContext('2d').getImageData(1, 1, 200, 10)"
    drawn = f"{pixels}.data.some((value) => value)"
    assert browser.evaluate(drawn)
    browser.wait_for(f"{REQUESTS}.some((request) => request.startsWith('my-request-'))")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
    assert not [line for line in browser.console if '"level": "error"' in line or "exception" in line]


def test_page_names_the_time_since_which_the_server_is_silent(
    browser: Browser, make_model: Callable[..., Path]
) -> None:
    with threaded_server(make_model("llama"), ready=False) as server:
        browser.open(server.url)
        browser.wait_for(f"{CONNECTION}.startsWith('live')")
    browser.wait_for(f"/no answer since .*, \\d+ s/.test({CONNECTION})")


def test_docs_show_the_endpoints_without_other_servers(browser: Browser, server: ThreadedServer) -> None:
    browser.open(f"{server.url}/docs")
    browser.wait_for("document.querySelectorAll('.opblock').length >= 16")
    loaded = browser.evaluate("performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert loaded
    assert all(address.startswith((server.url, "data:")) for address in loaded), loaded
    of_page = [line for line in browser.console if server.url in line]  # others are of earlier tests' servers
    assert not [line for line in of_page if '"level": "error"' in line or "exception" in line]
