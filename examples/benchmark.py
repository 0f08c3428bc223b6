"""Measure a running server: `python examples/benchmark.py HOST:PORT [NUM_REQUESTS]`.

Sends all requests at once and reports output throughput, the time to the first token and the time between tokens.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time

from quire import AsyncClient, CompletionDelta, SamplingParams


async def measure(client: AsyncClient, seed: int) -> tuple[list[float], int]:
    """Return the arrival times of one request's deltas, in seconds since its start, and the number of tokens."""
    sampling_params = SamplingParams(max_tokens=64, temperature=0.8, seed=seed, ignore_eos=True)
    started, arrivals, num_tokens = time.perf_counter(), [], 0
    async for event in client.generate_stream("It was a dark night, and", sampling_params):
        if isinstance(event, CompletionDelta):
            arrivals.append(time.perf_counter() - started)
            num_tokens += len(event.token_ids)
    return arrivals, num_tokens


async def run(target: str, num_requests: int) -> None:
    async with AsyncClient(target) as client:
        await measure(client, seed=0)  # warm up
        started = time.perf_counter()
        results = await asyncio.gather(*(measure(client, seed) for seed in range(num_requests)))
        seconds = time.perf_counter() - started
    first = [arrivals[0] for arrivals, _ in results]
    between = [(arrivals[-1] - arrivals[0]) / (num_tokens - 1) for arrivals, num_tokens in results]
    print(f"{sum(num_tokens for _, num_tokens in results) / seconds:.0f} tokens/s, {num_requests} requests")
    print(f"time to first token {1e3 * statistics.median(first):.1f} ms (median)")
    print(f"time between tokens {1e3 * statistics.median(between):.1f} ms (median)")


def main() -> None:
    target = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
    num_requests = int(sys.argv[2]) if len(sys.argv) > 2 else 16
    asyncio.run(run(target, num_requests))


if __name__ == "__main__":
    main()
