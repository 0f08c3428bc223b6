"""`quire run-batch`: every request is answered once, also if the command is killed and the server is away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from deadlines import PROGRAM_TIMEOUT_S

from quire.cluster.cli.batch.http_caller import Server
from quire.cluster.cli.batch.run import BatchResult, run_batch
from quire.cluster.client.wire.batch_files import OutputFile, check_batch, parse_request
from quire.proto.errors import ConfigError, ServerUnreachable

CHAT = "/v1/chat/completions"


class StubServer(ThreadingHTTPServer):
    """Echoes the body. A body with ``status`` gets that status, one with ``busy`` gets 503 that many times first."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.num_calls: Counter[str] = Counter()
        self.tokens: set[str | None] = set()
        self.num_answers = 0
        self.hold_after = -1  # no answer after this many
        self.held = threading.Event()
        self.release = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StubServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = str(body.get("n"))
        self.server.num_calls[number] += 1
        self.server.tokens.add(self.headers["Authorization"])
        if self.server.num_answers == self.server.hold_after:
            self.server.held.set()
            self.server.release.wait(60)
        self.server.num_answers += 1
        is_busy = self.server.num_calls[number] <= body.get("busy", 0)
        content = json.dumps({"id": f"cmpl-{number}", "path": self.path, **body}).encode()
        self.send_response(503 if is_busy else body.get("status", 200))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def stub_server() -> Iterator[StubServer]:
    server = StubServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        thread.join()
        server.server_close()


def write_batch(path: Path, bodies: list[dict[str, Any]]) -> Path:
    lines = [
        {"custom_id": f"request-{n}", "method": "POST", "url": CHAT, "body": {"n": n, **body}}
        for n, body in enumerate(bodies)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def answers(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines), "a request has two answers"
    return {line["custom_id"]: line["response"] for line in lines}


def test_every_request_is_answered_in_openai_s_form(tmp_path: Path) -> None:
    batch, out = write_batch(tmp_path / "in", [{} for _ in range(30)]), tmp_path / "out"
    with stub_server() as server:
        result = run_batch(batch, out, Server(server.url, token="secret"), concurrency=4)
    assert result == BatchResult(30, 0, 0)
    assert server.tokens == {"Bearer secret"}
    found = answers(out)
    assert found["request-7"] == {
        "status_code": 200,
        "request_id": "cmpl-7",
        "body": {"id": "cmpl-7", "path": CHAT, "n": 7},
    }
    assert len(found) == 30
    assert {"id", "custom_id", "response", "error"} == json.loads(out.read_text().splitlines()[0]).keys()


def test_failed_requests_are_answers_and_busy_servers_are_asked_again(tmp_path: Path) -> None:
    batch, out = write_batch(tmp_path / "in", [{}, {"status": 400}, {"busy": 2}]), tmp_path / "out"
    with stub_server() as server:
        assert run_batch(batch, out, Server(server.url), concurrency=2) == BatchResult(3, 0, 1)
        assert server.num_calls == {"0": 1, "1": 1, "2": 3}
        assert answers(out)["request-1"]["status_code"] == 400
        assert run_batch(batch, out, Server(server.url), concurrency=2) == BatchResult(3, 3, 1)
        assert server.num_calls.total() == 5


def test_server_that_stays_away_ends_the_batch_with_its_answers_kept(tmp_path: Path) -> None:
    batch, out = (
        write_batch(tmp_path / "in", [{}, {"busy": 10**9}, *({} for _ in range(50))]),
        tmp_path / "out",
    )
    with stub_server() as server:
        with pytest.raises(ServerUnreachable, match=r"did not answer in 0\.5 s: HTTP status 503"):
            run_batch(batch, out, Server(server.url, retry_s=0.5), concurrency=2)
        assert "request-1" not in answers(out)
    server_away = Server(server.url, retry_s=0.0)
    with pytest.raises(ServerUnreachable, match="ConnectionRefusedError"):
        run_batch(batch, out, server_away, concurrency=2)


def test_killed_batch_resumes_where_it_was(tmp_path: Path) -> None:
    batch, out = write_batch(tmp_path / "in", [{} for _ in range(40)]), tmp_path / "out"
    with stub_server() as server:
        server.hold_after = 20
        command = [sys.executable, "-m", "quire", "run-batch", str(batch), str(out), "--url", server.url]
        process = subprocess.Popen([*command, "--concurrency", "1"], stderr=subprocess.DEVNULL)
        assert server.held.wait(PROGRAM_TIMEOUT_S)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with out.open("ab") as file:
            file.write(b'{"custom_id": "torn')  # as a crash of the machine may leave it
        server.hold_after = -1
        server.release.set()
        assert 0 < out.read_bytes().count(b"\n") <= 20
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "40 requests answered, 20 of them by an earlier run, 0 failed" in done.stderr
    assert len(answers(out)) == 40
    assert max(server.num_calls.values()) <= 2  # the one that ran when the process was killed


def test_output_of_another_kind_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("my notes\n")
    with pytest.raises(ConfigError, match="line 1 is no line of a batch's output"):
        OutputFile(out)
    assert out.read_text() == "my notes\n"


def test_second_run_with_the_same_output_is_refused(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "out"), pytest.raises(ConfigError, match="being written by another run"):
        OutputFile(tmp_path / "out")


def test_append_after_close_is_refused(tmp_path: Path) -> None:
    output = OutputFile(tmp_path / "out")
    output.close()
    output.close()
    with pytest.raises(ValueError, match="closed"):
        output.append("a", 200, {})


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"url": "/v1/x", "body": {}}', "custom_id is None"),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/x", "body": {}}', "method is 'GET'"),
        ('{"custom_id": "a", "url": "http://x/v1", "body": {}}', "url is 'http://x/v1'"),
        ('{"custom_id": "a", "url": "/v1/x\\r\\nX: y", "body": {}}', "url is"),
        ('{"custom_id": "a", "url": "/v1/x"}', "body is not"),
        ('{"custom_id": "a", "url": "/v1/x", "body": {"stream": true}}', "body.stream is true"),
    ],
)
def test_line_that_is_no_request_is_refused(line: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_request(line.encode())


def test_problems_of_a_file_are_named_together_before_anything_is_sent(tmp_path: Path) -> None:
    batch = write_batch(tmp_path / "in", [{}, {}])
    batch.write_text(batch.read_text() * 2 + "{\n" * 20)
    with pytest.raises(ConfigError) as caught:
        check_batch(batch)
    assert len(caught.value.problems) == 11
    assert "line 3: custom_id is 'request-0', which an earlier line has" in caught.value.problems[0]
    assert "12 more lines are not requests" in caught.value.problems[-1]


@pytest.mark.parametrize("path", ["/v1/score", "/score", "/rerank", "/v1/rerank", "/v2/rerank"])
def test_scores_and_ranks_are_requests_of_a_batch(path: str) -> None:
    assert parse_request(json.dumps({"custom_id": "a", "url": path, "body": {}}).encode()).url == path


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "http://x/v1", "http://x:99999"])
def test_bad_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url is"):
        Server(url)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot be written"):
        OutputFile(tmp_path / "out")
