"""Day-long back-tests of the autoscaler: `decide` beside fixed fleets and policies that know the future.

    python -m benchmarks.autoscale_day --json FILE

A day is made of azure_code_2023: pieces of five minutes, drawn at random from the recording, so that its bursts stay
and nothing repeats with a period, and thinned by a cosine from a tenth of the load at night to all of it at noon. The
fleet is one queue, in steps of a second: each ready replica computes prompts at the rate of a Llama of 8 billion
parameters on an NVIDIA L4, and outputs, of 28 tokens in the mean, take no time. So a day takes a minute to simulate.
On the shift of `benchmarks.autoscale`, where every step is simulated, both give shares within the target that differ
by 0.01, and GPU-hours that differ by 2 %.

A request is within the target if the computation of its prompt begins at most TARGET_WAIT_S after its arrival. Hours
count from a replica's start to its end. The policies:

- ``fixed``: the smallest fleet with 99 % of the requests within the target;
- ``quire``: `decide` with the defaults of ScalingLimits, which were chosen on the first day; the second is the test;
- ``short_memory``: `decide` with a hold of 300 s and a reserve of a third, its defaults until this benchmark;
- ``curve``: knows the load of each second in advance, but no burst: as many replicas in proportion to the cosine as
  99 % within the target take. No policy that cannot foresee bursts can be expected to need less;
- ``oracle``: knows every arrival, and starts each replica one cold start before it is needed. What it needs is an
  upper bound of the optimum.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.autoscale import L4, MAX_REPLICAS, MIN_LOAD, TARGET_SHARE, TARGET_WAIT_S, TRACES
from benchmarks.common import Figure, make_parser, report
from benchmarks.trace import Trace, read_trace
from quire.cluster.config.deployment import ScalingLimits
from quire.cluster.fleet.controller.autoscaler import FleetSnapshot, ReplicaSample
from quire.cluster.fleet.controller.fleet_state import ReplicaState
from quire.cluster.simulation.fleet import Policy, autoscaling

DAY_S = 86_400
PIECE_S = 300.0
NAME = "azure_code_2023"
# Longest stretch of arrivals that the oracle looks at for the replicas that they need together.
_MOST_STRETCH_S = 240

Series = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Day:
    """Arrivals of each second.

    Attributes:
        tokens, requests: [seconds], prompt tokens and requests that arrive.
        load: [seconds], share of the recording's load.
    """

    tokens: Series
    requests: Series
    load: Series


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a policy: the share of requests within the target, and the seconds of all replicas."""

    within: float
    replica_seconds: float


def tokens_per_s() -> float:
    """Return the prompt tokens that a replica computes per second."""
    return L4.step_time.device.flops_per_s / L4.step_time.cost.flops_per_token


def make_day(trace: Trace, seed: int, seconds: int = DAY_S) -> Day:
    """Return a day of random pieces of a trace."""
    rng, length = random.Random(seed), trace.requests[-1].arrival_s
    load = MIN_LOAD + (1 - MIN_LOAD) * (1 - np.cos(2 * np.pi * np.arange(seconds) / seconds)) / 2
    tokens, requests = np.zeros(seconds), np.zeros(seconds)
    for begin in range(0, seconds, int(PIECE_S)):
        shift = rng.uniform(0, length)
        for request in trace.requests:
            offset = (request.arrival_s - shift) % length
            second = begin + int(offset)
            if offset < PIECE_S and second < seconds and rng.random() < load[second]:
                tokens[second] += request.num_prompt_tokens
                requests[second] += 1
    return Day(tokens, requests, load)


def run_policy(day: Day, policy: Policy, num_replicas: int, cold_start_s: float) -> Outcome:
    """Serve a day under a policy, which begins with so many ready replicas."""
    rate = tokens_per_s()
    num_ready, starting = num_replicas, list[float]()
    backlog = num_within = replica_seconds = 0.0
    before = 0, 0.0  # requests and tokens of the last second
    for second, (arrived, num_requests) in enumerate(
        zip(day.tokens.tolist(), day.requests.tolist(), strict=True)
    ):
        while starting and starting[0] <= second:
            starting.pop(0)
            num_ready += 1
        snapshot = _snapshot(second, num_ready, len(starting), backlog, before, cold_start_s)
        num_more = policy(snapshot) - num_ready - len(starting)
        starting += [second + cold_start_s] * num_more
        for _ in range(-num_more):  # those that start are stopped first, as the controller does
            if starting:
                starting.pop()
            else:
                num_ready -= 1
        replica_seconds += num_ready + len(starting)
        room = (
            TARGET_WAIT_S * rate * num_ready - backlog
        )  # tokens ahead of the last request within the target
        share = 1.0 if room >= arrived or not arrived else max(0.0, room / arrived)
        num_within += math.ceil(share * num_requests)
        before = int(num_requests), arrived
        backlog = max(0.0, backlog + arrived - rate * num_ready)
    return Outcome(num_within / float(day.requests.sum()), replica_seconds)


def _snapshot(
    second: int,
    num_ready: int,
    num_starting: int,
    backlog: float,
    before: tuple[int, float],
    cold_start_s: float,
) -> FleetSnapshot:
    rate, share = tokens_per_s(), backlog / max(1, num_ready)
    ready = ReplicaSample(
        ReplicaState.READY,
        queued_tokens=int(share),
        num_requests=int(backlog > 0),
        oldest_wait_s=share / rate,
        tokens_per_s=rate,
    )
    return FleetSnapshot(
        float(second),
        (ready,) * num_ready + (ReplicaSample(ReplicaState.STARTING),) * num_starting,
        arrived_requests=before[0],
        arrived_tokens=int(before[1]),
        cold_start_s=cold_start_s,
    )


def follow(targets: Series) -> Policy:
    """Return the policy of a number of replicas for each second."""
    numbers = targets.astype(int).tolist()
    return lambda snapshot: numbers[int(snapshot.time_s)]


def cheapest(day: Day, candidates: Sequence[Series], cold_start_s: float) -> Outcome:
    """Return the outcome of the first of the fleets, each larger than the one before, that meets the target."""

    def outcome(number: int) -> Outcome:
        targets = candidates[number]
        return run_policy(day, follow(targets), int(targets[0]), cold_start_s)

    numbers = range(len(candidates))
    return outcome(bisect_left(numbers, TARGET_SHARE, key=lambda number: outcome(number).within))


def fixed_fleets(day: Day) -> list[Series]:
    return [np.full(day.tokens.size, float(size)) for size in range(1, MAX_REPLICAS + 1)]


def curves(day: Day) -> list[Series]:
    """Return fleets in proportion to the load, each with a quarter of a replica more at noon."""
    return [np.maximum(1, np.ceil(day.load * quarters / 4)) for quarters in range(4, 4 * MAX_REPLICAS)]


def oracles(day: Day, cold_start_s: float) -> list[Series]:
    """Return fleets that compute all stretches of arrivals in time, but for less and less too much at once.

    A stretch of s seconds may take s seconds and the target wait. The replicas of all of that time must be enough.
    """
    total, seconds = np.concatenate([[0.0], np.cumsum(day.tokens)]), day.tokens.size
    needed = np.zeros(seconds)
    for stretch in (*range(1, 30), *range(30, _MOST_STRETCH_S, 5)):
        rate = np.zeros(seconds)
        span_s = stretch + int(TARGET_WAIT_S)
        rate[: seconds - stretch + 1] = (total[stretch:] - total[:-stretch]) / span_s
        needed = np.maximum(needed, latest_maximum(rate, span_s))
    fleets = [
        np.maximum(1, np.ceil(needed / tokens_per_s() / (percent / 100))) for percent in range(140, 90, -2)
    ]
    return [latest_maximum(fleet[::-1], int(cold_start_s) + 2)[::-1] for fleet in fleets]


def latest_maximum(values: Series, count: int) -> Series:
    """Return for each place the maximum of it and the `count` - 1 values before."""
    found, span = values.copy(), 1
    while span < count:
        shift = min(span, count - span)
        shifted = found.copy()
        shifted[shift:] = np.maximum(found[shift:], found[:-shift])
        found, span = shifted, span + shift
    return found


def compare(day: Day, cold_start_s: float) -> dict[str, Outcome]:
    """Return policy |-> outcome."""
    fixed = cheapest(day, fixed_fleets(day), cold_start_s)
    size = round(fixed.replica_seconds / day.tokens.size)
    limits = ScalingLimits(min_replicas=1, max_replicas=MAX_REPLICAS, target_wait_s=TARGET_WAIT_S)
    short = ScalingLimits(
        min_replicas=1,
        max_replicas=MAX_REPLICAS,
        target_wait_s=TARGET_WAIT_S,
        target_use=0.65,
        down_delay_s=300.0,
    )
    return {
        "fixed": fixed,
        "quire": run_policy(day, autoscaling(limits), size, cold_start_s),
        "short_memory": run_policy(day, autoscaling(short), size, cold_start_s),
        "curve": cheapest(day, curves(day), cold_start_s),
        "oracle": cheapest(day, oracles(day, cold_start_s), cold_start_s),
    }


def figures_of(name: str, outcomes: dict[str, Outcome]) -> dict[str, Figure]:
    fixed_s = outcomes["fixed"].replica_seconds
    figures = {}
    for policy, outcome in outcomes.items():
        share = f"{outcome.replica_seconds / fixed_s:.0%} of fixed"
        figures[f"day.within_target.{name}.{policy}"] = Figure(outcome.within, "share")
        figures[f"day.gpu_hours.{name}.{policy}"] = Figure(outcome.replica_seconds / 3600, "GPU-hours", share)
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--days", type=int, default=2, metavar="N", help="number of days, each with its own seed"
    )
    parser.add_argument("--cold-start-s", type=float, default=L4.cold_start_s)
    arguments = parser.parse_args()
    trace = read_trace(TRACES / f"{NAME}.csv.gz")
    figures: dict[str, Figure] = {}
    for number in range(1, arguments.days + 1):
        day = make_day(trace, seed=number)
        figures |= figures_of(f"code_{number}", compare(day, arguments.cold_start_s))
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
