"""Prefix cache hit rate of a fleet by routing policy, on multi-turn traces.

    python -m benchmarks.routing [--traces DIR] --json FILE

The fleet is simulated (`quire.cluster.simulation`) with the scheduler, prefix cache and router that serve: hashes of
prompts, and statuses and cache reports of the replicas every second. Arrivals are compressed so that any number of
replicas is about equally busy.

- ``fleet.hit_rate.<trace>.<n>.<policy>``: share of the prompt tokens that were found cached;
- ``fleet.imbalance.<trace>.<n>.<policy>``: prompt tokens that the busiest replica computed, over the mean;
- ``fleet.choice_us.<blocks>``: processor time in which the Router chooses for a prompt of that many blocks among
  8 replicas, each with 64 k cached blocks, one of them with the prompt's;
- ``fleet.choice_us.replicas.<n>``: the same for a prompt of 64 blocks that all replicas have cached.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path

from benchmarks.common import Figure, make_parser, median, report
from benchmarks.replay import NO_LIMIT, Ended, ReplicaModel, busy_s
from benchmarks.trace import Trace, read_traces
from quire.cluster.fleet.routing.router import ReplicaLoad, Router
from quire.cluster.simulation.fleet import Choose, SimulatedFleet
from quire.proto.digests import CACHE_HASH_BYTES
from quire.proto.stream import CacheReport

TRACES = Path(__file__).parent / "traces"
NUMS_REPLICAS = (2, 4, 8)
BLOCK_SIZE = 16
NUM_BLOCKS = 8192  # per replica
# Share of the time in which replicas would be busy if every step were full. Steps are not, so replicas are busier.
LOAD = 0.3
NUM_CHOICES = 200


def route(trace: Trace, num_replicas: int, policy: str) -> tuple[float, float]:
    """Return (hit rate, imbalance) of a trace under a routing policy."""
    model = ReplicaModel(
        num_blocks=NUM_BLOCKS, max_num_seqs=256, max_model_len=trace.max_tokens, max_queue_len=NO_LIMIT
    )
    config = model.config()
    compressed = trace.over(busy_s(trace, model.step_time) / (LOAD * num_replicas))
    fitting = (each for each in compressed.requests if each.num_tokens <= config.max_servable_tokens)
    ended = Ended()
    make = POLICIES[policy]
    choose = None if make is None else make()
    SimulatedFleet(config, model.step_time, ended, num_replicas=num_replicas, choose=choose).run(fitting)
    num_prompt, num_computed = 0, Counter[str]()
    for request in ended.requests:
        num_prompt += request.traced.num_prompt_tokens
        num_computed[request.replica_id] += request.traced.num_prompt_tokens - request.num_cached_tokens
    num_all = num_computed.total()
    return 1 - num_all / num_prompt, max(num_computed.values()) * num_replicas / num_all


def _at_random() -> Choose:
    rng = random.Random(1)
    return lambda hashes, loads: rng.choice(list(loads))


def _round_robin() -> Choose:
    numbers = count()
    return lambda hashes, loads: list(loads)[next(numbers) % len(loads)]


# None for the router that serves.
POLICIES: Mapping[str, Callable[[], Choose] | None] = {
    "cache_aware": None,
    "random": _at_random,
    "round_robin": _round_robin,
}


def time_choices() -> dict[str, Figure]:
    """Return microseconds per choice."""
    caches = {f"replica-{number}": os.urandom(65_536 * CACHE_HASH_BYTES) for number in range(8)}
    figures = {}
    for num_blocks in (0, 64, 512):
        note = f"8 replicas of 64 k blocks; {num_blocks * BLOCK_SIZE} tokens found at one"
        hashes = _first_hashes(caches["replica-3"], num_blocks)
        figures[f"fleet.choice_us.{num_blocks}"] = Figure(_choice_us(caches, hashes), "us", note)
    for num_replicas in (10, 100, 1000):
        shared = os.urandom(64 * CACHE_HASH_BYTES)
        caches = {f"replica-{number}": shared for number in range(num_replicas)}
        note = "64 blocks of a system prompt that all replicas have cached"
        figures[f"fleet.choice_us.replicas.{num_replicas}"] = Figure(
            _choice_us(caches, _first_hashes(shared, 64)), "us", note
        )
    return figures


def _choice_us(caches: Mapping[str, bytes], hashes: Sequence[bytes]) -> float:
    """Return the median processor time of a choice, in microseconds, among idle replicas with these hashes."""
    router = Router(BLOCK_SIZE, random.Random(0))
    for replica_id, hashes_of_replica in caches.items():
        router.apply_report(replica_id, CacheReport(1, 0, hashes_of_replica, b""))
        router.set_load(replica_id, ReplicaLoad(0, 0.0))
    times = []
    for _ in range(NUM_CHOICES):
        begin = time.thread_time_ns()
        router.choose(hashes, b"")
        times.append((time.thread_time_ns() - begin) / 1000)
    return median(times)


def _first_hashes(cache: bytes, num_blocks: int) -> list[bytes]:
    width = CACHE_HASH_BYTES
    return [cache[start : start + width] for start in range(0, num_blocks * width, width)]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="DIR", help="whole traces")
    parser.add_argument("--requests", type=int, default=1000, help="most of each trace")
    arguments = parser.parse_args()
    figures = time_choices()
    for whole in read_traces(arguments.traces):
        if not whole.shares_prefixes:
            continue
        trace = whole.first(arguments.requests)
        for num_replicas in NUMS_REPLICAS:
            for policy in POLICIES:
                hit_rate, imbalance = route(trace, num_replicas, policy)
                name = f"{trace.name}.{num_replicas}.{policy}"
                note = f"{len(trace.requests)} requests"
                figures[f"fleet.hit_rate.{name}"] = Figure(hit_rate, "share", note)
                figures[f"fleet.imbalance.{name}"] = Figure(imbalance, "ratio", note)
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
