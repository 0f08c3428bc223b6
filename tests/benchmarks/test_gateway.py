"""What the client of the gateway's benchmark counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import numpy as np

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
