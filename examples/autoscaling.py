"""The autoscaler at work on three hours of made-up traffic: `python examples/autoscaling.py [FILE.png]`

Calls the function that decides for a real fleet, `decide`, once per simulated second. The load is a wave with a
sudden peak. A replica computes TOKENS_PER_S prompt tokens per second and needs COLD_START_S to start. With a file
name, draws requests, replicas and waiting time; that needs `pip install 'quire[bench]'`.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass, field

from quire import ScalingLimits
from quire.cluster.fleet.controller.autoscaler import FleetSnapshot, ReplicaSample, ScalingState, decide
from quire.cluster.fleet.controller.fleet_state import ReplicaState

DURATION_S = 3 * 3600
TOKENS_PER_S = 4000.0
PROMPT_TOKENS = 500
COLD_START_S = 60
LIMITS = ScalingLimits(min_replicas=1, max_replicas=12, target_wait_s=5.0, target_use=0.8, down_delay_s=300.0)


@dataclass
class History:
    """Values per second."""

    requests: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)


def requests_per_s(second: int) -> float:
    """Return the load: a wave of one and a half hours, and a peak of ten minutes."""
    wave = 12 - 10 * math.cos(2 * math.pi * second / 5400)
    return wave + (25 if 8000 <= second < 8600 else 0)


def simulate(seed: int = 0) -> History:
    """Run the autoscaler in simulated time."""
    rng, state, history = random.Random(seed), ScalingState(), History()
    ready_at = [0]  # of each replica
    waiting_tokens = 0.0
    for second in range(DURATION_S):
        num_requests = _poisson(rng, requests_per_s(second))
        waiting_tokens += num_requests * PROMPT_TOKENS
        ready = [at for at in ready_at if at <= second]
        computed = min(waiting_tokens, len(ready) * TOKENS_PER_S)
        waiting_tokens -= computed
        wait_s = waiting_tokens / (len(ready) * TOKENS_PER_S)
        busy = ReplicaSample(
            ReplicaState.READY,
            queued_tokens=round(waiting_tokens / len(ready)),
            num_requests=round(waiting_tokens / PROMPT_TOKENS / len(ready)),
            oldest_wait_s=wait_s,
            tokens_per_s=TOKENS_PER_S if computed else 0.0,
        )
        starting = ReplicaSample(ReplicaState.STARTING)
        decision = decide(
            FleetSnapshot(
                float(second),
                (*[busy] * len(ready), *[starting] * (len(ready_at) - len(ready))),
                arrived_requests=num_requests,
                arrived_tokens=num_requests * PROMPT_TOKENS,
                cold_start_s=COLD_START_S,
            ),
            LIMITS,
            state,
        )
        state = decision.state
        ready_at += [second + COLD_START_S] * (decision.target - len(ready_at))
        del ready_at[max(1, decision.target) :]  # the newest first
        history.requests.append(num_requests)
        history.ready.append(len(ready))
        history.started.append(len(ready_at))
        history.wait_s.append(wait_s)
    return history


def draw(history: History, file: str) -> None:
    """Draw the history into a file."""
    from matplotlib import pyplot

    figure, (load, replicas, waits) = pyplot.subplots(3, 1, sharex=True, figsize=(9, 7), layout="constrained")
    minutes = [second / 60 for second in range(DURATION_S)]
    load.plot(minutes, history.requests, linewidth=0.5)
    load.set_ylabel("requests/s")
    replicas.step(minutes, history.started, label="started")
    replicas.step(minutes, history.ready, label="ready")
    replicas.set_ylabel("replicas")
    replicas.legend()
    waits.plot(minutes, history.wait_s)
    waits.axhline(LIMITS.target_wait_s, linestyle="--", color="gray")
    waits.set_ylabel("wait (s)")
    waits.set_xlabel("minutes")
    figure.savefig(file, dpi=110)


def main() -> None:
    history = simulate()
    mean = sum(history.started) / DURATION_S
    in_time = sum(wait <= LIMITS.target_wait_s for wait in history.wait_s) / DURATION_S
    print(f"{sum(history.requests)} requests, {mean:.1f} replicas on average, {max(history.started)} at most")
    print(
        f"waits within {LIMITS.target_wait_s:g} s: {in_time:.1%} of the time, longest {max(history.wait_s):.1f} s"
    )
    if len(sys.argv) > 1:
        draw(history, sys.argv[1])


def _poisson(rng: random.Random, mean: float) -> int:
    """Return a Poisson number: the exponential gaps that fit into one unit of time."""
    count, time = 0, rng.expovariate(mean)
    while time < 1:
        count, time = count + 1, time + rng.expovariate(mean)
    return count


if __name__ == "__main__":
    main()
