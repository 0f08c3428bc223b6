"""The benchmark of a gateway: what its client counts, and a short run of all its processes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gateway import FIRST_ID, NUM_IDS, Meter


def test_meter_counts_tokens_and_the_time_since_their_steps() -> None:
    times = np.zeros(NUM_IDS + 1)
    times[7] = time.monotonic() - 2.0

    async def stream() -> AsyncIterator[list[int]]:
        yield []
        yield [FIRST_ID + 7]
        yield [FIRST_ID + 7, FIRST_ID + 8]

    meter = Meter(times)
    asyncio.run(meter.read(stream()))
    figures = meter.figures(0.5)
    assert meter.num_started == 1
    assert figures["tokens_per_s"] == 6.0
    assert 2000 <= figures["added_ms_p50"] <= figures["added_ms_p99"] < 60_000
    meter.reset()
    assert meter.figures(1.0)["tokens_per_s"] == 0.0


@pytest.mark.slow
def test_benchmark_measures_both_doors(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.gateway", "--json", str(path)]
    options = ["--seconds", "0.5", "--streams", "2", "--gateways", "1", "2"]
    subprocess.run([*command, *options], check=True, timeout=280)
    figures = json.loads(path.read_text())["figures"]
    for name in ("grpc.2", "http.2", "grpc.2.two_gateways"):
        assert figures[f"gateway.{name}.tokens_per_s"]["value"] > 0
        assert figures[f"gateway.{name}.added_ms_p99"]["value"] > 0
    assert "gateway.grpc.idle_stream_bytes" in figures
