"""Simulated runs against real ones: the demo model on this machine.

    python -m benchmarks.simulation_accuracy [--requests N] --json benchmarks/results/simulation_accuracy.json
    python -m benchmarks.simulation_accuracy --tensor-parallel-size 2 --json FILE  # ...accuracy_tp2.json

All times of one rank are processor time of one thread, those of several ranks wall time; where the engine would wait
for a request, its clock moves there. The steps of an engine are measured and fitted as `quire calibrate` does, with
one configuration, before and after each workload, since a shared machine's speed changes. The workload runs twice
with the same scheduler: on real ranks, and on ranks that take the fitted time. No workload is in the fit: lengths,
arrivals and limits are others. The garbage collector is off, since a scheduler's process collects while it is idle.

Figures, those of several ranks with ``tp<ranks>.`` before the workload:

- ``simulation.<workload>.fit.p50`` and ``.p90``: errors of single steps of the calibration;
- ``simulation.<workload>.steps.<kind>``: predicted over measured time of the real run's steps of a kind, less 1, with
  all requests at once: those that only decode, that begin sequences, and that have other chunks of prompts. They tell
  where an error of the throughput comes from;
- ``simulation.<workload>.<figure>``: the simulated figure over the real one, less 1, with the real one as a note. The
  throughput is that of all requests at once, the latencies are those at ``LOAD`` of it.

The workloads: ``chat`` has lognormal lengths and Poisson arrivals; ``prefixes`` also shares 8 beginnings; ``chunks``
has long prompts in small chunks; ``preemptions`` has too few blocks for the sequences that it admits.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.common import Figure, make_parser, report
from quire.cluster.config.engine_options import DEMO_MODEL, EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.offline.cluster_engine import open_ranks
from quire.cluster.simulation.calibration import measure_steps
from quire.cluster.simulation.engine import make_engine
from quire.cluster.simulation.fleet import SimulatedFleet, SimulatedRequest
from quire.cluster.simulation.replica import GATEWAY
from quire.cluster.simulation.run import Summary
from quire.cluster.simulation.step_time import StepTime, fit_coefficients, relative_errors
from quire.cluster.simulation.traces import VOCAB_SIZE, TracedRequest
from quire.proto.config import EngineConfig
from quire.proto.sampling import SamplingParams
from quire.proto.stream import GatewayMessage, ReplicaMessage, Submit, TokenBatch
from quire.scheduler import MeasuredStep, MeteredRanks, Scheduler, StepLoop, WorkerGroup

LOAD = 0.6
BLOCK = 16
MAX_NUM_SEQS = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests without arrival times, and what the engine has for them.

    Attributes:
        num_blocks: of the pool.
        chunk: tokens per step.
    """

    prompt_tokens: float
    output_tokens: float
    num_blocks: int = 1024
    chunk: int = 512
    num_prefixes: int = 0


WORKLOADS = {
    "chat": Workload(80, 40),
    "prefixes": Workload(160, 24, num_prefixes=8),
    "chunks": Workload(300, 16, chunk=64),
    "preemptions": Workload(40, 100, num_blocks=64),
}


def make_requests(workload: Workload, count: int, max_tokens: int, seed: int) -> list[TracedRequest]:
    """Return requests that all arrive at 0."""
    rng = np.random.default_rng(seed)
    requests = []
    for number in range(count):
        lens = rng.lognormal(np.log((workload.prompt_tokens, workload.output_tokens)) - 0.125, 0.5)
        num_prompt, num_output = np.clip(lens, 1, (max_tokens * 2 // 3, max_tokens // 4)).astype(int).tolist()
        num_blocks = -(-num_prompt // BLOCK)
        hashes: tuple[int, ...] = ()
        if workload.num_prefixes:
            prefix = 1000 * int(rng.integers(1, workload.num_prefixes + 1))
            own = 1_000_000 + 1000 * number
            hashes = tuple((prefix if 2 * place < num_blocks else own) + place for place in range(num_blocks))
        requests.append(TracedRequest(number, 0.0, num_prompt, num_output, hashes))
    return requests


def with_arrivals(requests: Sequence[TracedRequest], rate: float) -> list[TracedRequest]:
    """Return the requests with the arrivals of a Poisson process."""
    times = np.cumsum(np.random.default_rng(1).exponential(1 / rate, len(requests)))
    return [replace(each, arrival_s=at) for each, at in zip(requests, times.tolist(), strict=True)]


# Name of a figure |-> its value in a run of so many seconds.
THROUGHPUT = {"output_tokens_per_s": lambda summary, seconds: summary.num_output_tokens / seconds}
LATENCIES = {
    f"{latency}.{column}": lambda summary, _, latency=latency, share=share: getattr(
        summary, latency
    ).quantile(share)
    for latency in ("ttft", "itl")
    for column, share in (("p50", 0.5), ("p99", 0.99))
}


class SkippingClock:
    """Seconds of another clock, and what was skipped."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._skipped_s = -clock()

    def __call__(self) -> float:
        return self._clock() + self._skipped_s

    def skip_to(self, now: float) -> None:
        """Move the clock to a time, unless that has passed."""
        self._skipped_s += max(0.0, now - self())


class RealGateway:
    """The mailbox of a step loop on real ranks, which sends requests when they are due."""

    def __init__(self, vocab_size: int, clock: Callable[[], float]) -> None:
        self._pending: list[TracedRequest] = []
        self._running: dict[int, SimulatedRequest] = {}
        self._summary, self._vocab_size = Summary(), vocab_size
        self.now = SkippingClock(clock)

    @property
    def is_done(self) -> bool:
        return not self._pending and not self._running

    def begin(self, requests: Sequence[TracedRequest], summary: Summary) -> float:
        """Send other requests from now on, for another summary; return the time."""
        now = self.now()
        self._pending = [replace(each, arrival_s=now + each.arrival_s) for each in reversed(requests)]
        self._summary = summary
        return now

    def receive(self, timeout_s: float) -> list[tuple[bytes, GatewayMessage]]:
        if timeout_s > 0 and self._pending:
            self.now.skip_to(self._pending[-1].arrival_s)
        due: list[tuple[bytes, GatewayMessage]] = []
        while self._pending and self._pending[-1].arrival_s <= self.now():
            traced = self._pending.pop()
            self._running[traced.number] = SimulatedRequest(traced)
            sampling = SamplingParams(
                max_tokens=traced.num_output_tokens, temperature=0.0, seed=0, ignore_eos=True
            )
            prompt = (traced.prompt() % self._vocab_size).astype(np.int32)
            due.append(
                (GATEWAY, Submit(traced.number, f"request-{traced.number}", prompt, sampling=sampling))
            )
        return due

    def send(self, gateway: bytes, message: ReplicaMessage) -> bool:
        assert isinstance(message, TokenBatch)
        now = self.now()
        for handle in message.handles.tolist():
            request = self._running[handle]
            request.num_received += 1
            if request.last_token_s is None:
                request.first_token_s = now
                self._summary.on_first_token(request, now)
            else:
                self._summary.on_gap(now - request.last_token_s)
            request.last_token_s = now
        for finish in message.finished:
            request = self._running.pop(finish.handle)
            request.ended_at, request.error = now, finish.error
            request.num_cached_tokens = finish.num_cached_tokens
            self._summary.on_end(request)
        return True

    def wake(self) -> None: ...


def serve_real(
    config: EngineConfig,
    ranks: WorkerGroup,
    requests: Sequence[TracedRequest],
    clock: Callable[[], float],
    on_phase: Callable[[], None] = lambda: None,
) -> tuple[Summary, float]:
    """Serve requests on real ranks; return the summary and the seconds.

    Args:
        on_phase: called before the first request, which warms up, and before all requests.
    """
    # Empties the rows that an earlier scheduler left, and collects garbage in the first step.
    ranks.rebuild(1)
    gateway = RealGateway(config.model.vocab_size, clock)
    loop = StepLoop(Scheduler(config), ranks, gateway, "real", gateway.now)
    summary, began_at = Summary(), 0.0
    for phase in (requests[:1], requests):
        on_phase()
        began_at = gateway.begin(phase, summary := Summary())
        while not gateway.is_done:
            loop.turn()
    return summary, gateway.now() - began_at


def serve_simulated(
    config: EngineConfig, step_time: StepTime, requests: Sequence[TracedRequest]
) -> tuple[Summary, float]:
    """Serve requests in simulated time; return the summary and the seconds."""
    summary = Summary()
    model = replace(config.model, vocab_size=max(VOCAB_SIZE, config.model.vocab_size))
    cost = SimulatedFleet(replace(config, model=model), step_time, summary).run(requests)
    return summary, cost.end_s


def fit_errors(step_time: StepTime, steps: Sequence[MeasuredStep]) -> dict[str, Figure]:
    """Return the errors of single steps of the calibration."""
    errors = np.abs(relative_errors(step_time, steps))
    return {
        f"fit.{column}": Figure(float(np.quantile(errors, share)), "share", f"{len(steps)} steps")
        for column, share in (("p50", 0.5), ("p90", 0.9))
    }


def step_errors(step_time: StepTime, steps: Sequence[MeasuredStep]) -> dict[str, Figure]:
    """Return the error of the time of all steps of each kind together."""
    kinds: dict[str, list[MeasuredStep]] = {"decode": [], "begin": [], "prompt": []}
    for step in steps:
        kinds["begin" if step.work.num_new else "prompt" if step.work.num_pairs else "decode"].append(step)
    figures = {}
    for kind, own in kinds.items():
        if own:
            measured = sum(step.seconds for step in own)
            predicted = sum(step_time.seconds(step.work) for step in own)
            remark = f"{len(own)} steps of {1e3 * measured / len(own):.2f} ms"
            figures[f"steps.{kind}"] = Figure(predicted / measured - 1, "share", remark)
    return figures


@dataclass(frozen=True, slots=True)
class RealRun:
    """A workload on real ranks, with the steps of the calibrations around it.

    Attributes:
        steps: of all requests at once.
        arriving: the requests at LOAD of the throughput.
    """

    calibration: list[MeasuredStep]
    steps: list[MeasuredStep]
    at_once: tuple[Summary, float]
    arriving: list[TracedRequest]
    at_load: tuple[Summary, float]


def run_real(
    config: EngineConfig,
    ranks: WorkerGroup,
    requests: Sequence[TracedRequest],
    clock: Callable[[], float],
    calibrate: Callable[[], list[MeasuredStep]],
) -> RealRun:
    """Run a workload between two calibrations."""
    calibration, steps = calibrate(), list[MeasuredStep]()
    metered = MeteredRanks(
        ranks,
        config.scheduler.max_num_seqs,
        clock,
        lambda work, seconds: steps.append(MeasuredStep(work, seconds)),
        is_serial=True,
    )
    summary, seconds = at_once = serve_real(config, metered, requests, clock, steps.clear)
    steps = [step for step in steps if step.work.num_tokens]
    arriving = with_arrivals(requests, LOAD * summary.num_ended / seconds)
    at_load = serve_real(config, ranks, arriving, clock)
    return RealRun(calibration + calibrate(), steps, at_once, arriving, at_load)


def run_errors(
    config: EngineConfig, real: RealRun, step_time: StepTime, requests: Sequence[TracedRequest]
) -> dict[str, Figure]:
    """Return the relative errors of the throughput of all requests at once, and of the latencies at LOAD of it."""
    errors = compare(THROUGHPUT, real.at_once, serve_simulated(config, step_time, requests))
    errors |= step_errors(step_time, real.steps)
    return errors | compare(LATENCIES, real.at_load, serve_simulated(config, step_time, real.arriving))


def compare(
    measures: Mapping[str, Callable[[Summary, float], float]],
    real: tuple[Summary, float],
    simulated: tuple[Summary, float],
) -> dict[str, Figure]:
    """Return the relative error of each measure."""
    figures = {}
    for name, measure in measures.items():
        known, guess = measure(*real), measure(*simulated)
        figures[name] = Figure(guess / known - 1, "share", f"{known:.4g} in reality")
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=400, help="of each workload")
    parser.add_argument("--repeats", type=int, default=1, help="of the probes, before and after a workload")
    parser.add_argument("--model", type=Path, help="a model directory; default: the demo model")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks (default: %(default)s)")
    arguments = parser.parse_args()
    name = DEMO_MODEL if arguments.model is None else str(arguments.model)
    tp = arguments.tensor_parallel_size
    options = EngineOptions(
        name,
        max_num_seqs=MAX_NUM_SEQS,
        num_kv_blocks=1025,
        max_num_batched_tokens=512,
        max_steps_in_flight=1,
        tensor_parallel_size=tp,
    )
    clock = time.process_time if tp == 1 else time.perf_counter
    assumed = make_engine(options, "cpu").step_time
    figures: dict[str, Figure] = {}
    gc.disable()
    with open_ranks(resolve(options, Machine(num_cores=tp, num_gpus=0))) as (config, ranks):
        for workload_name, workload in WORKLOADS.items():
            limits = replace(config.scheduler, max_num_batched_tokens=workload.chunk)
            own = replace(
                config, scheduler=limits, cache=replace(config.cache, num_kv_blocks=workload.num_blocks + 1)
            )

            def calibrate() -> list[MeasuredStep]:
                ranks.rebuild(1)
                return measure_steps(config, ranks, arguments.repeats, SkippingClock(clock))

            requests = make_requests(workload, arguments.requests, own.max_servable_tokens, seed=7)
            gc.collect()
            real = run_real(own, ranks, requests, clock, calibrate)
            step_time = replace(assumed, coefficients=fit_coefficients(assumed, real.calibration))
            errors = {**fit_errors(step_time, real.calibration), **run_errors(own, real, step_time, requests)}
            label = workload_name if tp == 1 else f"tp{tp}.{workload_name}"
            figures |= {f"simulation.{label}.{figure}": error for figure, error in errors.items()}
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
