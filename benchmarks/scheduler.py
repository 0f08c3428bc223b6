"""Cost of a step of the control plane, without a model.

    python -m benchmarks.scheduler --json benchmarks/results/scheduler.json

Times schedule(), the plan's encoding and apply() in steady decode: sequences of about 1,000 tokens with staggered
lengths, so that in each step the same share of them crosses a block boundary. Sampled tokens are random.

With ``--scaling`` also costs that must not grow: a request from submission to its one token, with pools of up to a
million blocks, all in use or cached, also with prompts that begin with the same token or system prompt, and queues
of up to 100,000 requests; the longest garbage collection; steps for 100 gateways; and steps per second of the whole
loop with ranks that take no time. These are in CPU time, since other work on the machine would hide the differences.
"""

from __future__ import annotations

import gc
import time
from collections import deque

import numpy as np

from benchmarks.common import Figure, make_parser, median, report
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.resolve import engine_config
from quire.proto.config import ModelConfig
from quire.proto.replica_status import RankStatus
from quire.proto.sampling import SamplingParams
from quire.proto.step import EncoderInput, StepPlan, StepResult
from quire.proto.stream import GatewayMessage, ReplicaMessage, Submit
from quire.scheduler.core.scheduler import Scheduler
from quire.scheduler.service.collector import IDLE_INTERVAL_S, IdleCollector
from quire.scheduler.service.loop import StepLoop
from quire.scheduler.service.worker_group import Rebuilt

BLOCK_SIZE = 16
CONTEXT = 1000
STEPS = 320

# Sequences whose prompts are computed in one step: a step has at most a million tokens.
FILLED_AT_ONCE = 1024

POOL_BLOCKS = (1_000, 10_000, 100_000, 1_000_000)
QUEUED = (1_000, 10_000, 100_000)
SIBLINGS_BLOCKS = (1_000, 10_000, 100_000)
# First tokens that all prompts share |-> name: the token that begins each text, or a system prompt of 1.5 blocks.
SHARED = {1: "bos", 24: "system"}
PAUSE_BLOCKS = (16_000, 64_000, 256_000)
REQUESTS_PER_S = 100
GATEWAYS = (1, 100)
ROWS_OF_GATEWAYS = 960
FILLER_TOKENS = 4_000
ADMITTED_TOKENS = 65
ROWS = 64
REQUESTS = 1_024
BATCHES = 3


def make_scheduler(running: int, prefix_caching: bool) -> Scheduler:
    blocks = running * ((CONTEXT + STEPS) // BLOCK_SIZE + 4) + 1
    options = EngineOptions(
        "none",
        block_size=BLOCK_SIZE,
        num_kv_blocks=blocks,
        prefix_caching=prefix_caching,
        max_num_seqs=running,
        max_num_batched_tokens=min(running, FILLED_AT_ONCE) * (CONTEXT + BLOCK_SIZE) + running,
    )
    return Scheduler(engine_config(options, make_model()))


def make_model() -> ModelConfig:
    return ModelConfig(
        path="", name="none", architecture="", hf={}, dtype="float32", max_model_len=4096, vocab_size=32000,
        num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1, eos_token_ids=(2,),
    )  # fmt: skip


def fill(scheduler: Scheduler, running: int, num_gateways: int = 1) -> None:
    """Submit the sequences, in turns from each gateway, and run their prefills in as few steps as possible."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=STEPS + 64)
    for first in range(0, running, FILLED_AT_ONCE):
        handles = range(first, min(running, first + FILLED_AT_ONCE))
        for handle in handles:
            prompt = rng.integers(100, 30000, CONTEXT + handle % BLOCK_SIZE).astype(np.int32)
            gateway = b"gateway %d" % (handle % num_gateways)
            scheduler.add(gateway, Submit(handle, f"request-{handle}", prompt, params), 0.0)
        plan = scheduler.schedule(0.0)
        assert plan is not None
        assert len(plan.new) == len(handles), f"{len(plan.new)} of {len(handles)} were admitted"
        tokens = np.full(handles.stop, 100, np.int32)
        scheduler.apply(StepResult(plan.step_id, plan.epoch, 0, tokens), 0.0)


def decode(scheduler: Scheduler, running: int) -> tuple[list[float], list[int]]:
    """Return the seconds and plan bytes of each of STEPS steady steps."""
    rng = np.random.default_rng(1)
    seconds, sizes = [], []
    for _ in range(STEPS):
        tokens = rng.integers(100, 30000, running).astype(np.int32)
        start = time.perf_counter()
        plan = scheduler.schedule(0.0)
        assert plan is not None
        frame = plan.encode()
        scheduler.apply(StepResult(plan.step_id, plan.epoch, 0, tokens), 0.0)
        seconds.append(time.perf_counter() - start)
        sizes.append(len(frame))
    return seconds, sizes


def measure(
    running: int, prefix_caching: bool, repetitions: int, num_gateways: int = 1
) -> tuple[float, float]:
    """Return the median microseconds per step and the median plan bytes."""
    times, sizes = [], []
    for _ in range(repetitions):
        scheduler = make_scheduler(running, prefix_caching)
        fill(scheduler, running, num_gateways)
        gc.collect()
        gc.freeze()  # as a server does after its start
        seconds, plan_sizes = decode(scheduler, running)
        times.append(1e6 * median(seconds))
        sizes.append(median([float(size) for size in plan_sizes]))
    return median(times), median(sizes)


def make_admitting(num_blocks: int) -> Scheduler:
    """Return a scheduler of ROWS rows that can start a prompt in each of them in one step."""
    options = EngineOptions(
        "none",
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_blocks + 1,
        max_num_seqs=ROWS,
        max_num_batched_tokens=ROWS * ADMITTED_TOKENS,
        max_queue_len=1_000_000,
    )
    return Scheduler(engine_config(options, make_model()))


def submit(
    scheduler: Scheduler,
    handles: range,
    num_tokens: int = ADMITTED_TOKENS,
    num_shared: int = 0,
    now: float = 0.0,
) -> None:
    """Submit requests for one token each, with prompts that are unique after their first `num_shared` tokens."""
    rng = np.random.default_rng(handles.start)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    for handle in handles:
        prompt = rng.integers(100, 30000, num_tokens).astype(np.int32)
        prompt[:num_shared] = 1
        scheduler.add(b"gateway", Submit(handle, f"request-{handle}", prompt, params), now)


def serve(scheduler: Scheduler, num_requests: int, now: float = 0.0) -> None:
    """Step until so many more requests have finished."""
    goal = scheduler.stats.num_finished + num_requests
    while scheduler.stats.num_finished < goal:
        plan = scheduler.schedule(now)
        assert plan is not None
        plan.encode()
        tokens = np.full(len(plan.new), 100, np.int32)
        scheduler.apply(StepResult(plan.step_id, plan.epoch, 0, tokens), now)


def admit_us(scheduler: Scheduler, first_handle: int, num_shared: int = 0) -> float:
    """Return the CPU microseconds per request to submit REQUESTS and serve as many from the head of the queue."""
    gc.collect()
    gc.freeze()
    costs = []
    for batch in range(BATCHES):
        handles = range(first_handle + batch * REQUESTS, first_handle + (batch + 1) * REQUESTS)
        start = time.process_time()
        submit(scheduler, handles, num_shared=num_shared)
        serve(scheduler, REQUESTS)
        costs.append(1e6 * (time.process_time() - start) / REQUESTS)
    return median(costs)


def measure_pool(num_blocks: int) -> float:
    """Return `admit_us` with a pool full of cached blocks, so that each new block evicts another."""
    scheduler = make_admitting(num_blocks)
    num_fillers = num_blocks * BLOCK_SIZE // FILLER_TOKENS + 1
    for handle in range(num_fillers):
        submit(scheduler, range(handle, handle + 1), FILLER_TOKENS)
        serve(scheduler, 1)
    assert scheduler.blocks.num_cached_blocks > 0.9 * num_blocks
    return admit_us(scheduler, num_fillers)


def measure_siblings(num_blocks: int, num_shared: int) -> float:
    """Return `admit_us` with a pool full of prompts whose blocks follow the same tokens."""
    scheduler, first_handle = make_admitting(num_blocks), 0
    while scheduler.blocks.num_cached_blocks < 0.9 * num_blocks:
        submit(scheduler, range(first_handle, first_handle + ROWS), num_shared=num_shared)
        serve(scheduler, ROWS)
        first_handle += ROWS
    return admit_us(scheduler, first_handle, num_shared)


def measure_pause(num_blocks: int) -> float:
    """Return the longest garbage collection in milliseconds of CPU time, while a pool with a shared prefix is filled.

    100 requests come per second, so that 6,000 of them are retained.
    """
    scheduler, collector = make_admitting(num_blocks), IdleCollector()
    pauses, began_at, num_served = [0.0], 0.0, 0

    def on_collection(phase: str, info: dict[str, int]) -> None:
        nonlocal began_at
        if phase == "start":
            began_at = time.thread_time()
        else:
            pauses.append(time.thread_time() - began_at)

    thresholds = gc.get_threshold()
    collector.start()
    gc.callbacks.append(on_collection)
    while scheduler.blocks.num_cached_blocks < 0.9 * num_blocks:
        now = num_served / REQUESTS_PER_S
        submit(scheduler, range(num_served, num_served + ROWS), num_shared=1, now=now)
        serve(scheduler, ROWS, now)
        num_served += ROWS
        collector.turn(now, is_idle=False)
    collector.turn(now + IDLE_INTERVAL_S, is_idle=True)
    gc.callbacks.remove(on_collection)
    gc.set_threshold(*thresholds)
    return 1000 * max(pauses)


def measure_queue(num_queued: int) -> float:
    """Return `admit_us` with so many requests in the queue."""
    scheduler = make_admitting(POOL_BLOCKS[0])
    submit(scheduler, range(num_queued))
    return admit_us(scheduler, num_queued)


class NoOpGroup:
    """Ranks that take no time and sample the same token for each running row."""

    def __init__(self, running: int) -> None:
        self._token_ids = np.full(running, 100, np.int32)
        self._plans: deque[StepPlan] = deque()

    def broadcast(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def send_media(self, image: EncoderInput) -> None: ...

    def gather(self, timeout_s: float) -> StepResult:
        plan = self._plans.popleft()
        return StepResult(plan.step_id, plan.epoch, 0, self._token_ids)

    def check(self) -> None: ...

    def examine(self, waited_s: float, *, failed_s: float) -> None: ...

    def rebuild(self, epoch: int) -> Rebuilt:
        raise AssertionError("ranks that cannot fail are rebuilt")

    def statuses(self) -> tuple[RankStatus, ...]:
        return ()

    def close(self) -> None: ...


class NoOpMailbox:
    """A mailbox without messages, which drops those that are sent."""

    def receive(self, timeout_s: float) -> list[tuple[bytes, GatewayMessage]]:
        return []

    def send(self, gateway: bytes, message: ReplicaMessage) -> bool:
        return True

    def wake(self) -> None: ...


def measure_loop(running: int) -> float:
    """Return the steps per CPU second of StepLoop in steady decode, with ranks that take no time."""
    scheduler = make_scheduler(running, prefix_caching=True)
    fill(scheduler, running)
    loop = StepLoop(scheduler, NoOpGroup(running), NoOpMailbox(), "none")
    gc.collect()
    gc.freeze()
    start = time.process_time()
    for _ in range(STEPS):
        loop.step()
    return STEPS / (time.process_time() - start)


def measure_steps(running: list[int], repetitions: int) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for count in running:
        for prefix_caching in (True, False):
            step_us, plan_bytes = measure(count, prefix_caching, repetitions)
            switch = "on" if prefix_caching else "off"
            note = f"steady decode, {CONTEXT} tokens of context, prefix caching {switch}"
            figures[f"scheduler.step_us.{count}.{switch}"] = Figure(step_us, "us", note)
        figures[f"scheduler.plan_bytes.{count}"] = Figure(
            plan_bytes, "bytes", "median of a steady decode step"
        )
    return figures


def measure_scaling(running: list[int], repetitions: int) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    request = f"a request of {ADMITTED_TOKENS} tokens, submission to its one token, CPU time"
    for num_blocks in POOL_BLOCKS:
        note = f"{request}, each block evicting a cached one"
        figures[f"scheduler.admit_us.blocks.{num_blocks}"] = Figure(measure_pool(num_blocks), "us", note)
    for num_shared, name in SHARED.items():
        for num_blocks in SIBLINGS_BLOCKS:
            note = f"{request}, of which all prompts share {num_shared}"
            admitted_us = measure_siblings(num_blocks, num_shared)
            figures[f"scheduler.admit_us.{name}.{num_blocks}"] = Figure(admitted_us, "us", note)
    for num_blocks in PAUSE_BLOCKS:
        note = f"longest garbage collection, {REQUESTS_PER_S} requests/s, prompts begin alike, CPU time"
        figures[f"scheduler.pause_ms.{num_blocks}"] = Figure(measure_pause(num_blocks), "ms", note)
    for num_gateways in GATEWAYS:
        step_us, _ = measure(ROWS_OF_GATEWAYS, True, repetitions, num_gateways)
        note = f"steady decode of {ROWS_OF_GATEWAYS} sequences from so many gateways"
        figures[f"scheduler.step_us.gateways.{num_gateways}"] = Figure(step_us, "us", note)
    for num_queued in QUEUED:
        note = f"{request}, so many waiting"
        figures[f"scheduler.admit_us.queued.{num_queued}"] = Figure(measure_queue(num_queued), "us", note)
    for count in running:
        rate = median([measure_loop(count) for _ in range(repetitions)])
        note = "StepLoop, ranks take no time; per CPU second"
        figures[f"scheduler.noop_steps_per_s.{count}"] = Figure(rate, "steps/s", note)
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024, 4096], metavar="N")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--scaling", action="store_true", help="also with growing pools and queues (a few minutes)"
    )
    arguments = parser.parse_args()
    figures = measure_steps(arguments.running, arguments.repetitions)
    if arguments.scaling:
        figures |= measure_scaling(arguments.running, arguments.repetitions)
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
