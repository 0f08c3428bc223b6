"""Every program in examples/ runs as a user would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quire.cluster.config.deployment import read_fleet_file
from quire.cluster.demo.server import ServerProcess

EXAMPLES = Path(__file__).parents[2] / "examples"
TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


def run_example(name: str, *arguments: str) -> str:
    """Run a program of examples/ and return its output."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_offline_prints_a_completion_for_every_prompt() -> None:
    printed = run_example("offline.py")
    assert printed.count("->") == 3
    assert printed.count("log-probability -") == 3


def test_chat_answers_every_question(demo_model_dir: Path, tmp_path: Path) -> None:
    for path in demo_model_dir.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    printed = run_example("chat.py", str(tmp_path))
    assert printed.count("user: ") == 2
    assert printed.count("assistant: ") >= 2


@pytest.mark.cluster
def test_streaming_client_prints_tokens_usage_and_timings(server: ServerProcess) -> None:
    printed = run_example("streaming_client.py", server.address)
    assert "Usage(" in printed
    assert "Timings(" in printed


@pytest.mark.cluster
def test_async_client_completes_all_and_cancels_one(server: ServerProcess) -> None:
    printed = run_example("async_client.py", server.address)
    assert printed.count("->") == 3
    assert "canceled after" in printed


@pytest.mark.cluster
def test_benchmark_reports_throughput_and_latency(server: ServerProcess) -> None:
    printed = run_example("benchmark.py", server.address, "4")
    assert "tokens/s, 4 requests" in printed
    assert "time between tokens" in printed


def test_fleet_file_holds_two_models_with_limits_of_their_own() -> None:
    small, large = read_fleet_file(EXAMPLES / "fleet.toml")
    assert (small.name, small.limits.max_replicas) == ("small", 3)
    assert (large.name, large.limits.min_replicas, large.engine.tensor_parallel_size) == ("large", 0, 2)


def test_readme_lists_every_example() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    missing = [path.name for path in EXAMPLES.iterdir() if path.is_file() and f"]({path.name})" not in listed]
    assert missing == ["README.md"]
