"""aiperf, NVIDIA's load generator, against the HTTP server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from local_server import ThreadedServer

from quire.cluster.cli.bench.targets import AiperfLoad, read_aiperf
from quire.cluster.simulation.run import Targets
from tests.clients.conftest import RunProgram

NUM_REQUESTS = 24
OUTPUT_LEN = 16


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf_measures_streams(
    endpoint: str, server: ThreadedServer, model_dir: Path, run_program: RunProgram, tmp_path: Path
) -> None:
    """All requests of eight concurrent streams succeed, and aiperf finds latencies and the tokens' number."""
    run_program(
        "aiperf", "aiperf", "profile", "--model", "tiny", "--url", server.url, "--endpoint-type", endpoint,
        "--streaming", "--concurrency", "8", "--request-count", str(NUM_REQUESTS), "--tokenizer", model_dir,
        "--use-server-token-count", "--isl", "24", "--osl", str(OUTPUT_LEN), "--random-seed", "1",
        "--extra-inputs", f'{{"ignore_eos": true, "min_tokens": {OUTPUT_LEN}}}', "--ui", "none",
        "--no-gpu-telemetry", "--workers-max", "1", "--output-artifact-dir", tmp_path / "results",
    )  # fmt: skip
    (export,) = (tmp_path / "results").rglob("profile_export_aiperf.json")
    figures = json.loads(export.read_text())
    assert figures["request_count"]["avg"] == NUM_REQUESTS
    assert figures["output_sequence_length"]["min"] == figures["output_sequence_length"]["max"] == OUTPUT_LEN
    assert 0 < figures["time_to_first_token"]["avg"] < figures["request_latency"]["avg"]
    assert figures["inter_token_latency"]["avg"] > 0


def test_bench_measures_a_server_by_aiperf(
    server: ThreadedServer, model_dir: Path, run_program: RunProgram, tmp_path: Path
) -> None:
    load = AiperfLoad(
        "tiny", str(model_dir), NUM_REQUESTS, None, 4, 24, OUTPUT_LEN, 2, 1, Targets(ttft_s=60.0)
    )
    run_program("aiperf", *load.command(server.url, tmp_path))
    figures = read_aiperf(tmp_path, "4 at once")
    assert (figures["requests"], figures["errors"]) == (NUM_REQUESTS, {})
    assert figures["goodput_requests_per_s"] == pytest.approx(figures["requests_per_s"], rel=0.05)
    assert 0 < figures["ttft_s"]["p50"] < figures["e2e_s"]["p50"]
