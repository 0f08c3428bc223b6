"""What a step of the control plane costs, with no model behind it.

    python -m benchmarks.scheduler --json benchmarks/results/scheduler.json

Times schedule(), the plan's encoding and apply() in steady decode: sequences of about 1,000 tokens whose lengths
are staggered, so that each step the same share of them crosses a block boundary. Sampled tokens are made up.
"""

from __future__ import annotations

import gc
import time

import numpy as np

from benchmarks.common import Figure, median, parser, report
from quire.proto.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from quire.proto.sampling import SamplingParams
from quire.proto.step import StepResult
from quire.proto.stream import Submit
from quire.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
CONTEXT = 1000
STEPS = 320


def make_scheduler(running: int, prefix_caching: bool) -> Scheduler:
    blocks = running * ((CONTEXT + STEPS) // BLOCK_SIZE + 4) + 1
    model = ModelConfig(
        path="", name="none", architecture="", hf={}, dtype="float32", max_model_len=4096, vocab_size=32000,
        num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1, eos_token_ids=(2,),
    )  # fmt: skip
    cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=blocks, prefix_caching=prefix_caching)
    limits = SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=running * (CONTEXT + BLOCK_SIZE))
    return Scheduler(EngineConfig(model, cache, scheduler=limits))


def fill(scheduler: Scheduler, running: int) -> None:
    """Submits the sequences and runs their prefill as one step."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=STEPS + 64)
    for handle in range(running):
        prompt = rng.integers(100, 30000, CONTEXT + handle % BLOCK_SIZE).astype(np.int32)
        scheduler.add(b"gateway", Submit(handle, f"request-{handle}", prompt, params), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert len(plan.new) == running, f"{len(plan.new)} of {running} were admitted"
    scheduler.apply(StepResult(plan.step_id, plan.epoch, 0, np.full(running, 100, np.int32)), 0.0)


def decode(scheduler: Scheduler, running: int) -> tuple[list[float], list[int]]:
    """Seconds and plan bytes of each of STEPS steady steps."""
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


def measure(running: int, prefix_caching: bool, repetitions: int) -> tuple[float, float]:
    """Median microseconds a step, and median plan bytes."""
    times, sizes = [], []
    for _ in range(repetitions):
        scheduler = make_scheduler(running, prefix_caching)
        fill(scheduler, running)
        gc.collect()
        gc.freeze()  # as a server does once it is up
        seconds, plan_sizes = decode(scheduler, running)
        times.append(1e6 * median(seconds))
        sizes.append(median([float(size) for size in plan_sizes]))
    return median(times), median(sizes)


def main() -> None:
    line = parser(__doc__)
    line.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024], metavar="N")
    line.add_argument("--repetitions", type=int, default=3)
    arguments = line.parse_args()
    figures: dict[str, Figure] = {}
    for running in arguments.running:
        for prefix_caching in (True, False):
            step_us, plan_bytes = measure(running, prefix_caching, arguments.repetitions)
            switch = "on" if prefix_caching else "off"
            note = f"steady decode, {CONTEXT} tokens of context, prefix caching {switch}"
            figures[f"scheduler.step_us.{running}.{switch}"] = Figure(step_us, "us", note)
        figures[f"scheduler.plan_bytes.{running}"] = Figure(plan_bytes, "bytes", "median of a steady decode step")
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
