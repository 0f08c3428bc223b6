"""Prefix cache hit rate of a fleet by routing policy, on multi-turn traces.

    python -m benchmarks.routing [--traces DIR] --json FILE

Each replica has the real control plane, with StepLoop, Scheduler and prefix cache, in simulated time over a worker
group without a model. The gateway's side is real, too: hashes of prompts, statuses and cache reports of the replicas
every REPORT_S, and the Router. Arrivals are compressed so that any number of replicas is about equally busy.

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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path

from benchmarks.common import Figure, make_parser, median, report
from benchmarks.replay import GATEWAY, Roofline, SimulatedClock, SimulatedGroup, make_config
from benchmarks.trace import Trace, TracedRequest, read_traces
from quire.cluster.gateway.routing.router import ReplicaLoad, Router
from quire.proto.config import EngineConfig
from quire.proto.digests import CACHE_HASH_BYTES, make_root, prefix_hashes
from quire.proto.sampling import SamplingParams
from quire.proto.stream import (
    CacheReport,
    Finish,
    FinishReason,
    GatewayMessage,
    ReplicaMessage,
    Submit,
    TokenBatch,
)
from quire.scheduler.core.scheduler import Scheduler
from quire.scheduler.service.loop import StepLoop

TRACES = Path(__file__).parent / "traces"
NUMS_REPLICAS = (2, 4, 8)
BLOCK_SIZE = 16
NUM_BLOCKS = 8192  # per replica
REPORT_S = 1.0
# Share of the time in which replicas would be busy if every step were full. Steps are not, so replicas are busier.
LOAD = 0.3
NUM_CHOICES = 200

# (hashes, replica_id |-> load) |-> replica_id
Choose = Callable[[Sequence[bytes], Mapping[str, ReplicaLoad]], str]


class Replica:
    """One replica's control plane in simulated time; also its Mailbox.

    Attributes:
        finishes: of its requests.
        load: as last reported.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.scheduler, self._clock = Scheduler(config), SimulatedClock()
        group = SimulatedGroup(config.scheduler.max_num_seqs, self._clock)
        self._loop = StepLoop(self.scheduler, group, self, "simulated", self._clock)
        self._inbox: deque[tuple[bytes, GatewayMessage]] = deque()
        self.finishes: list[Finish] = []
        self.load = ReplicaLoad(0, 0.0)
        self.reported_version = 0

    def advance(self, until: float) -> None:
        """Run steps until that time, or until there is nothing to compute."""
        while self._clock.now < until and self._loop.step():
            pass
        self._clock.now = max(self._clock.now, until)

    def submit(self, submit: Submit) -> None:
        rejection = self.scheduler.add(GATEWAY, submit, self._clock.now)
        assert rejection is None, rejection

    def report(self) -> CacheReport:
        """Update `load`; return the changes of the cache since the last report."""
        status = self._loop.status()
        self.load = ReplicaLoad(status.queued_tokens, status.kv_use)
        changes = self.scheduler.blocks.journal.report(self.reported_version)
        self.reported_version = changes.version
        return changes

    def receive(self, timeout_s: float) -> list[tuple[bytes, GatewayMessage]]:
        return []

    def send(self, gateway: bytes, message: ReplicaMessage) -> bool:
        assert isinstance(message, TokenBatch)
        for finish in message.finished:
            assert finish.reason is FinishReason.LENGTH, f"a request failed: {finish.error}"
            self.finishes.append(finish)
        return True

    def wake(self) -> None: ...


def route(trace: Trace, num_replicas: int, policy: str) -> tuple[float, float]:
    """Return (hit rate, imbalance) of a trace under a routing policy."""
    compressed = trace.over(Roofline().busy_s(trace) / (LOAD * num_replicas))
    config = make_config(NUM_BLOCKS, BLOCK_SIZE, 256, trace.max_tokens)
    replicas = {f"replica-{number}": Replica(config) for number in range(num_replicas)}
    router = Router(BLOCK_SIZE, random.Random(0))
    choose = POLICIES[policy](router)
    report_at = 0.0
    for request in compressed.requests:
        if request.num_tokens > config.max_servable_tokens:
            continue
        if request.arrival_s >= report_at:
            for replica_id, replica in replicas.items():
                replica.advance(request.arrival_s)
                router.apply_report(replica_id, replica.report())
            report_at = request.arrival_s + REPORT_S
        hashes = prefix_hashes(request.prompt(), BLOCK_SIZE, make_root(config.model.name))
        replica_id = choose(hashes, {name: replica.load for name, replica in replicas.items()})
        num_cached_tokens = BLOCK_SIZE * router.num_cached_blocks(replica_id, hashes)
        router.record_submit(replica_id, hashes)
        replica = replicas[replica_id]
        replica.advance(request.arrival_s)
        replica.submit(_submit(request))
        # Like the gateway, count the tokens sent since the replica's last report.
        queued_tokens = replica.load.queued_tokens + request.num_prompt_tokens - num_cached_tokens
        replica.load = ReplicaLoad(queued_tokens, replica.load.kv_use)
    for replica in replicas.values():
        replica.advance(float("inf"))
    return _hit_rate_and_imbalance([replica.finishes for replica in replicas.values()])


def _submit(request: TracedRequest) -> Submit:
    sampling = SamplingParams(max_tokens=request.num_output_tokens, seed=0, ignore_eos=True)
    return Submit(request.number, f"request-{request.number}", request.prompt(), sampling)


def _hit_rate_and_imbalance(finishes: list[list[Finish]]) -> tuple[float, float]:
    prompts = [sum(finish.num_prompt_tokens for finish in ended) for ended in finishes]
    cached = [sum(finish.num_cached_tokens for finish in ended) for ended in finishes]
    computed = [prompt - found for prompt, found in zip(prompts, cached, strict=True)]
    return sum(cached) / sum(prompts), max(computed) * len(computed) / sum(computed)


def _cache_aware(router: Router) -> Choose:
    def choose(hashes: Sequence[bytes], loads: Mapping[str, ReplicaLoad]) -> str:
        router.set_loads(loads)
        chosen = router.choose(hashes, b"")
        assert chosen is not None
        return chosen

    return choose


def _at_random(router: Router) -> Choose:
    rng = random.Random(1)
    return lambda hashes, loads: rng.choice(list(loads))


def _round_robin(router: Router) -> Choose:
    numbers = count()
    return lambda hashes, loads: list(loads)[next(numbers) % len(loads)]


POLICIES: Mapping[str, Callable[[Router], Choose]] = {
    "cache_aware": _cache_aware,
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
