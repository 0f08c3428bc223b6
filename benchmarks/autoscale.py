"""Back-tests of the autoscaler: `decide` on recorded traffic, against fixed fleets and a simple rule.

    python -m benchmarks.autoscale [--traces DIR] [--plot FILE.png] --json FILE

The fleet is simulated (`quire.cluster.simulation`): the scheduler, router and controller's decisions are those that
serve; a replica is a Llama of 8 billion parameters on an NVIDIA L4. Arrivals are recorded: azure_code_2023, with
bursts that are shorter than a cold start, and azure_conv_2023, an even load. Each is less than half an hour of one
afternoon, which leaves little to save. So a synthetic eight-hour shift is made of each, too: the recording repeated,
and thinned so that the load rises from a tenth to the whole and falls again.

A request is within the target if the computation of its prompt begins at most TARGET_WAIT_S after its arrival.
GPU-hours count from a replica's start to its end. The policies:

- ``fixed``: the smallest fleet with 99 % of the requests within the target, found by trying all sizes;
- ``quire``: `decide` with the defaults of ScalingLimits, which were chosen on the days of `benchmarks.autoscale_day`:
  they remove nothing within the first hour;
- ``ongoing_requests``: Ray Serve's rule with its defaults, which aims at two requests per replica.

Each policy begins with as many replicas as the fixed fleet, because a recording begins under load.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from benchmarks.common import Figure, image_path, make_parser, report
from benchmarks.replay import NO_LIMIT, Ended, ReplicaModel, roofline
from benchmarks.trace import Trace, read_trace
from quire.cluster.config.deployment import ScalingLimits
from quire.cluster.fleet.controller.autoscaler import FleetSnapshot
from quire.cluster.fleet.controller.fleet_state import ReplicaState
from quire.cluster.simulation.fleet import REPORT_S, Policy, SimulatedFleet, SimulatedRequest, autoscaling
from quire.cluster.simulation.traces import TracedRequest

TRACES = Path(__file__).parent / "traces" / "arrivals"
NAMES = ("azure_code_2023", "azure_conv_2023")
TARGET_WAIT_S = 10.0
TARGET_SHARE = 0.99
MAX_REPLICAS = 24
SHIFT_S = 8 * 3600.0
MIN_LOAD = 0.1


# Half of the card's 121 dense TFLOP/s, 300 GB/s, and the KV that its 24 GB at 90 % hold beside the weights.
L4 = ReplicaModel(
    roofline(flops_per_s=60e12, weight_bytes=16e9, bytes_per_s=300e9),
    num_blocks=2625,
    max_queue_len=NO_LIMIT,
    prefix_caching=False,
)


@dataclass(slots=True)
class FleetRun:
    """Result of a policy.

    Attributes:
        requests: all requests of the trace.
        replica_seconds: summed over the replicas, from start to end.
        history: (time, replicas started, replicas ready), one entry per change.
    """

    requests: list[SimulatedRequest]
    replica_seconds: float = 0.0
    history: list[tuple[float, int, int]] = field(default_factory=list)

    def within(self, target_wait_s: float) -> float:
        """Return the share of requests that waited at most `target_wait_s`."""
        return sum(request.wait_s <= target_wait_s for request in self.requests) / len(self.requests)


def run_policy(trace: Trace, policy: Policy, model: ReplicaModel, num_replicas: int) -> FleetRun:
    """Serve a trace under a policy, which begins with `num_replicas` ready replicas."""
    ended = Ended()
    fleet = SimulatedFleet(
        model.config(),
        model.step_time,
        ended,
        num_replicas=num_replicas,
        policy=policy,
        cold_start_s=model.cold_start_s,
    )
    cost = fleet.run(trace.requests)
    ended.requests.sort(key=lambda request: request.traced.number)
    return FleetRun(ended.requests, cost.replica_seconds, cost.history)


@dataclass(slots=True)
class OngoingRequests:
    """Ray Serve's default rule: `target` running requests per replica, averaged over `look_back_s`.

    More (or fewer) replicas than live must be wanted throughout a delay; then the fleet changes to the wanted size.
    """

    max_replicas: int
    target: float = 2.0
    look_back_s: float = 30.0
    up_delay_s: float = 30.0
    down_delay_s: float = 600.0

    def policy(self) -> Policy:
        num_running: deque[int] = deque(maxlen=round(self.look_back_s / REPORT_S))
        pending: tuple[int, float] = (0, 0.0)  # direction, since

        def policy(snapshot: FleetSnapshot) -> int:
            nonlocal pending
            live = [
                each
                for each in snapshot.replicas
                if each.state in (ReplicaState.READY, ReplicaState.STARTING)
            ]
            num_running.append(snapshot.buffered_requests + sum(each.num_requests for each in live))
            wanted = math.ceil(sum(num_running) / len(num_running) / self.target)
            wanted = min(max(1, wanted), self.max_replicas)
            direction = (wanted > len(live)) - (wanted < len(live))
            if direction != pending[0]:
                pending = direction, snapshot.time_s
            delay_s = self.up_delay_s if direction > 0 else self.down_delay_s
            return wanted if snapshot.time_s - pending[1] >= delay_s else len(live)

        return policy


def shift_of(trace: Trace, seed: int = 0) -> Trace:
    """Return eight hours of the repeated trace, thinned by a cosine from MIN_LOAD to 1 and back."""
    rng, length = random.Random(seed), trace.requests[-1].arrival_s
    requests: list[TracedRequest] = []
    for repeat in range(math.ceil(SHIFT_S / length)):
        for request in trace.requests:
            at = repeat * length + request.arrival_s
            share = MIN_LOAD + (1 - MIN_LOAD) * (1 - math.cos(2 * math.pi * at / SHIFT_S)) / 2
            if at < SHIFT_S and rng.random() < share:
                requests.append(replace(request, number=len(requests), arrival_s=at))
    return Trace(f"{trace.name}_shift", tuple(requests))


def half_of(trace: Trace, half: int) -> Trace:
    """Return the first (0) or the second (1) half of the trace's time, shifted to begin at 0."""
    begin, length = half * trace.requests[-1].arrival_s / 2, trace.requests[-1].arrival_s / 2
    requests = [each for each in trace.requests if begin <= each.arrival_s < begin + length]
    moved = (replace(each, arrival_s=each.arrival_s - begin) for each in requests)
    return Trace(f"{trace.name}_half{half + 1}", tuple(moved))


def smallest_fixed(trace: Trace, model: ReplicaModel) -> tuple[int, FleetRun]:
    """Return the smallest fixed fleet with TARGET_SHARE of the requests within the target, and its run."""
    mean = sum(each.num_prompt_tokens for each in trace.requests) / trace.requests[-1].arrival_s
    cost, device = model.step_time.cost, model.step_time.device
    min_size = max(1, math.floor(mean * cost.flops_per_token / device.flops_per_s))
    for size in range(min_size, 10 * MAX_REPLICAS):
        run = run_policy(trace, partial(_keep, size), model, size)
        if run.within(TARGET_WAIT_S) >= TARGET_SHARE:
            return size, run
    raise ValueError(f"{10 * MAX_REPLICAS} replicas are not enough for {trace.name}")


def _keep(size: int, _: FleetSnapshot) -> int:
    return size


def compare(trace: Trace, model: ReplicaModel, limits: ScalingLimits) -> dict[str, tuple[FleetRun, str]]:
    """Return policy |-> (its run, a remark)."""
    size, fixed = smallest_fixed(trace, model)
    policies: dict[str, Callable[[], Policy]] = {
        "quire": lambda: autoscaling(limits),
        "ongoing_requests": OngoingRequests(limits.max_replicas).policy,
    }
    runs = {name: run_policy(trace, make(), model, size) for name, make in policies.items()}
    peaks = {name: max(started for _, started, _ in run.history) for name, run in runs.items()}
    return {
        "fixed": (fixed, f"{size} replicas"),
        **{name: (run, f"at most {peaks[name]} replicas") for name, run in runs.items()},
    }


def figures_of(trace: Trace, runs: dict[str, tuple[FleetRun, str]]) -> dict[str, Figure]:
    fixed_s = runs["fixed"][0].replica_seconds
    figures = {}
    for policy, (run, remark) in runs.items():
        name = f"{trace.name}.{policy}"
        figures[f"fleet.within_target.{name}"] = Figure(run.within(TARGET_WAIT_S), "share", remark)
        share = f"{run.replica_seconds / fixed_s:.0%} of the fixed fleet's"
        figures[f"fleet.gpu_hours.{name}"] = Figure(run.replica_seconds / 3600, "GPU-hours", share)
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="DIR", help=f"with {', '.join(NAMES)}")
    parser.add_argument("--plot", type=image_path, metavar="FILE", help="draw load, replicas and waits")
    parser.add_argument("--cold-start-s", type=float, default=L4.cold_start_s)
    arguments = parser.parse_args()
    model = replace(L4, cold_start_s=arguments.cold_start_s)
    limits = ScalingLimits(min_replicas=1, max_replicas=MAX_REPLICAS, target_wait_s=TARGET_WAIT_S)
    figures, drawn = {}, []
    for name in NAMES:
        folder: Path = arguments.traces
        (path,) = [*folder.glob(f"{name}.csv"), *folder.glob(f"{name}.csv.gz")]
        recorded = read_trace(path)
        shift = shift_of(recorded)
        for trace in (recorded, half_of(recorded, 0), half_of(recorded, 1), shift):
            runs = compare(trace, model, limits)
            figures.update(figures_of(trace, runs))
            if trace in (recorded, shift):
                drawn.append((trace, runs))
    if arguments.plot is not None:
        from benchmarks.plots import draw_scaling  # matplotlib is an extra

        draw_scaling(arguments.plot, drawn, TARGET_WAIT_S)
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
