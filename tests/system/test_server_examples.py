"""Programs in examples/ that call a server, or start one with Ray, run as a user would run them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import COMMAND_TIMEOUT_S
from example_programs import EXAMPLES, RunExample, run_alone

from quire.cluster.cli.demo.server import ServerProcess

pytestmark = pytest.mark.cluster


def test_streaming_client_prints_tokens_usage_and_timings(
    run_example: RunExample, server: ServerProcess
) -> None:
    printed = run_example("streaming_client.py", server.address)
    assert "Usage(" in printed
    assert "Timings(" in printed


def test_async_client_completes_all_and_cancels_one(run_example: RunExample, server: ServerProcess) -> None:
    printed = run_example("async_client.py", server.address)
    assert printed.count("->") == 3
    assert "canceled after" in printed


def test_benchmark_reports_throughput_and_latency(run_example: RunExample, server: ServerProcess) -> None:
    printed = run_example("benchmark.py", server.address, "4")
    assert "tokens/s, 4 requests" in printed
    assert "time between tokens" in printed


def test_batch_file_is_answered_and_not_asked_again(server: ServerProcess, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "quire", "run-batch", str(EXAMPLES / "batch.jsonl"), str(out)]
    for _ in range(2):
        done = subprocess.run(
            [*command, "--url", server.http_url],
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answers = {line["custom_id"]: line for line in map(json.loads, out.read_text().splitlines())}
        assert answers.keys() == {"story", "letter", "chat"}
        assert {answer["response"]["status_code"] for answer in answers.values()} == {200}
        assert len(out.read_text().splitlines()) == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fleet_on_one_machine_continues_a_stream_after_a_failure() -> None:
    printed = run_alone("fleet_on_one_machine.py", timeout_s=800.0)
    assert "2 replicas are ready" in printed
    assert "killed rank 0 of replica-" in printed
    ended = re.search(r"^600 tokens came: (\d+) moves, (\d+) recoveries$", printed, re.MULTILINE)
    assert ended is not None
    assert int(ended[1]) + int(ended[2]) > 0
