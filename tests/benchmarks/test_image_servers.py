"""`python -m benchmarks.image_servers`: servers that take turns, and what is told of a missing one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import http_servers, image_servers, images
from benchmarks.http_servers import Server

# Answers like a server of the OpenAI API, on the port of its options; tells in its file how many calls had an image.
SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

port, calls = int(sys.argv[sys.argv.index("--port") + 1]), sys.argv[sys.argv.index("--model") + 1] + ".calls"

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): ...
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(b"")
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(0.1)
        used = time.process_time()
        while time.process_time() < used + 0.02: ...
        parts = request["messages"][0]["content"]
        with open(calls, "a") as file:
            print(sum(part["type"] == "image_url" for part in parts), file=file)
        self.answer(json.dumps({"usage": {"prompt_tokens": 40}}).encode())

ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure few and small images."""
    monkeypatch.setattr(images, "ONE_MEGAPIXEL", (64, 64))
    monkeypatch.setattr(images, "NUM_RATE_IMAGES", 3)
    for name, count in (("NUM_FIRST_TOKENS", 2), ("NUM_ROUNDS", 2)):
        monkeypatch.setattr(image_servers, name, count)


@pytest.fixture
def peers(tmp_path: Path) -> Path:
    """Return environments whose vLLM is the server above."""
    (tmp_path / "server.py").write_text(SERVER)
    python = tmp_path / "peers" / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "server.py"} "$@"\n')
    python.chmod(0o755)
    return tmp_path / "peers"


@pytest.fixture(autouse=True)
def fake_quire(peers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the same server take quire's place."""

    @contextmanager
    def server(folder: Path, *options: str) -> Iterator[Server]:
        with http_servers.vllm_server(folder.with_name("quire"), peers, *options) as own:
            yield Server(own.url, own.model, own.pid)

    monkeypatch.setattr(image_servers, "quire_server", server)


def test_servers_take_turns_with_the_same_prompts(peers: Path, tmp_path: Path) -> None:
    figures = image_servers.measure_peers(tmp_path / "vision", peers)
    kinds = [f"first_token_ms.{way}" for way in images.WAYS] + ["first_token.encoder_percent", "per_s"]
    assert set(figures) == {f"image_servers.{name}.{kind}" for name in ("quire", "vllm") for kind in kinds}
    assert figures["image_servers.vllm.per_s"].value > 0
    assert figures["image_servers.vllm.first_token_ms.cold"].note == "a new image of 1 megapixel, 40 tokens"
    calls = [(tmp_path / f"{name}.calls").read_text().split() for name in ("quire", "vision")]
    assert calls[0] == calls[1] == ["1", "1", "1", "1", "0"] * 2 + ["1", "1", "1", "1"] * 2


def test_processor_time_is_that_of_the_server(peers: Path, tmp_path: Path) -> None:
    """The server sleeps for 100 ms before it answers, and computes for 20 ms."""
    walls, used = (
        image_servers.measure_peers(tmp_path / "vision", peers, counts_processor_time=counts)
        for counts in (False, True)
    )
    name = "image_servers.vllm.first_token_ms.text"
    assert walls[name].value > 100 > used[name].value


def test_missing_server_is_left_out_with_the_reason(tmp_path: Path) -> None:
    figures = image_servers.measure_peers(tmp_path / "vision", tmp_path / "none")
    assert figures["image_servers.vllm.failed_after_s"].note == "vllm is not installed"
    assert figures["image_servers.quire.first_token_ms.cold"].value > 0
