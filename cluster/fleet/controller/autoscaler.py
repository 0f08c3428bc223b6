"""Autoscaler: the number of replicas that a model needs, as a pure function of snapshots.

`decide` is called about once per second with a FleetSnapshot and the ScalingState that it returned the last time. It
keeps no state, reads no clock and starts nothing. So the same function is tested by itself, back-tested on recorded
traffic (``python -m benchmarks.autoscale``) and run by the fleet's controller.

The recommendation is the largest number that any of these signals asks for:

- **arrivals**: recent arrivals would all have been computed within the target wait, and so will the arrivals to come,
  if they keep growing until a replica that is started now is ready;
- **backlog**: the prompt tokens that wait now, and those that will wait by then, are computed within the target wait;
- **memory**: KV blocks and rows in use, with the headroom of `target_memory_use`;
- **waiting**: a request has waited for longer than the target already.

GPU utilization is no signal: it is 100 % with one sequence as with a hundred.

The target follows the recommendations as in Kubernetes' horizontal pod autoscaler: it rises to the lowest
recommendation of the last `up_delay_s`, falls to the highest recommendation of the last `down_delay_s`, or to the
minimum after `idle_timeout_s` without a request, and changes by limited steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import fmean, pvariance

from ....proto.replica_status import ReplicaStatus
from ...config.deployment import ScalingLimits
from .fleet_state import Demand, ReplicaState

# Arrivals are counted in windows of this length; the last NUM_WINDOWS are kept.
WINDOW_S = 5.0
NUM_WINDOWS = 25
# Upper bound of the growth of arrivals that is extrapolated, as a factor.
MAX_GROWTH = 2.0
# The backlog is extrapolated by the mean arrivals over this many cold starts: a shorter burst ends before a replica
# that is started now could help.
NUM_TREND_COLD_STARTS = 2
# A replica's capacity is the highest throughput seen, reduced by this share per second: a tenth per hour.
CAPACITY_DECAY_PER_S = 3e-5
# Gateways with waiting requests report every second; after this much silence a gateway's report expires.
REPORT_LIFETIME_S = 10.0


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """One replica in a snapshot. If it is not ready, only its state counts.

    Attributes:
        queued_tokens: prompt tokens not computed yet.
        num_requests: running and waiting sequences.
        kv_use, row_use: shares of its KV blocks and of its rows that running sequences hold, 0 to 1.
        oldest_wait_s: longest time that a sequence has waited.
        tokens_per_s: recent throughput in prompt and sampled tokens, over the time in which it computed.
    """

    state: ReplicaState
    queued_tokens: int = 0
    num_requests: int = 0
    kv_use: float = 0.0
    row_use: float = 0.0
    oldest_wait_s: float = 0.0
    tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """One model's replicas and demand at one time.

    Attributes:
        time_s: monotonic.
        replicas: all that have processes.
        buffered_requests, buffered_tokens: requests, and their prompt tokens, that wait at gateways for a replica.
        arrived_requests, arrived_tokens: requests, and their prompt tokens, since the last snapshot.
        cold_start_s: time that the latest replica needed from its start to its canary; None if none was measured.
    """

    time_s: float
    replicas: tuple[ReplicaSample, ...] = ()
    buffered_requests: int = 0
    buffered_tokens: int = 0
    arrived_requests: int = 0
    arrived_tokens: int = 0
    cold_start_s: float | None = None


@dataclass(frozen=True, slots=True)
class ScalingState:
    """State between calls of `decide`. A new state works too: it begins at the present number of replicas.

    Attributes:
        target: the last target; None before the first.
        windows: (window number, prompt tokens that arrived in it), oldest first.
        recommendations: (time, replicas), oldest first; consecutive ones differ.
        tokens_per_s: a replica's capacity; below 1 if unknown.
        time_s: time of the last snapshot.
        changed_at: when the target last changed.
        busy_at: when there was last a request.
    """

    target: int | None = None
    windows: tuple[tuple[int, int], ...] = ()
    recommendations: tuple[tuple[float, int], ...] = ()
    tokens_per_s: float = 0.0
    time_s: float = 0.0
    changed_at: float = -math.inf
    busy_at: float = -math.inf


@dataclass(frozen=True, slots=True)
class Decision:
    """Number of replicas that a model should have, starting and ready ones together.

    Attributes:
        reason: why this number, for operators.
        state: the argument of the next call.
    """

    target: int
    reason: str
    state: ScalingState = field(repr=False, default_factory=ScalingState)


def decide(snapshot: FleetSnapshot, limits: ScalingLimits, state: ScalingState) -> Decision:
    """Return the next target; see the module's docstring."""
    state = _observe(snapshot, _initial_state(snapshot) if state.target is None else state)
    current = state.target or 0
    recommended, reason = _recommend(snapshot, limits, state, current)
    window_s = max(limits.up_delay_s, limits.down_delay_s)
    recommendations = _record(state.recommendations, snapshot.time_s, recommended, window_s)
    state = replace(state, recommendations=recommendations)
    target, hold = _stabilize(recommended, snapshot.time_s, limits, state)
    if hold:
        reason = f"{hold}; {reason}"
    changed_at = snapshot.time_s if target != current else state.changed_at
    return Decision(target, reason, replace(state, target=target, changed_at=changed_at))


def _initial_state(snapshot: FleetSnapshot) -> ScalingState:
    """Without a state, the live replicas are taken for the recommendation so far."""
    now, current = snapshot.time_s, _num_live(snapshot)
    busy_at = now if current else -math.inf
    return ScalingState(target=current, recommendations=((now, current),), time_s=now, busy_at=busy_at)


def _observe(snapshot: FleetSnapshot, state: ScalingState) -> ScalingState:
    """Return the state with the snapshot's arrivals, throughput and idleness."""
    now = snapshot.time_s
    number = int(now // WINDOW_S)
    windows = dict(state.windows)
    windows[number] = windows.get(number, 0) + snapshot.arrived_tokens
    kept = tuple(item for item in windows.items() if item[0] > number - NUM_WINDOWS)
    elapsed_s = max(0.0, now - state.time_s)
    highest = max((each.tokens_per_s for each in snapshot.replicas), default=0.0)
    capacity = max(highest, state.tokens_per_s * (1 - CAPACITY_DECAY_PER_S) ** elapsed_s)
    busy_at = now if _is_busy(snapshot) else state.busy_at
    return replace(state, windows=kept, tokens_per_s=capacity, time_s=now, busy_at=busy_at)


def _is_busy(snapshot: FleetSnapshot) -> bool:
    return bool(
        snapshot.arrived_requests
        or snapshot.buffered_requests
        or any(each.num_requests for each in snapshot.replicas)
    )


def _recommend(
    snapshot: FleetSnapshot, limits: ScalingLimits, state: ScalingState, current: int
) -> tuple[int, str]:
    """Return the number of replicas that would be right now, within the bounds, and the reason."""
    if snapshot.time_s - state.busy_at >= limits.idle_timeout_s:
        return limits.min_replicas, f"no request for {limits.idle_timeout_s:g} s"
    signals = {
        f"idle for less than {limits.idle_timeout_s:g} s": 1,
        **_throughput_signals(snapshot, limits, state),
        **_memory_signals(snapshot, limits),
        **_waiting_signal(snapshot, limits, current),
    }
    reason, wanted = max(signals.items(), key=lambda item: item[1])
    bounded = limits.clamp(wanted)
    if bounded == wanted:
        return bounded, reason
    bound = "min_replicas" if bounded > wanted else "max_replicas"
    return bounded, f"{bound} is {bounded}; {wanted} wanted: {reason}"


def _throughput_signals(
    snapshot: FleetSnapshot, limits: ScalingLimits, state: ScalingState
) -> dict[str, int]:
    """Return reason |-> replicas, for the prompt tokens that arrive and those that wait."""
    if state.tokens_per_s < 1.0:  # unknown
        return {}
    capacity = state.tokens_per_s * limits.target_use
    cold_start_s = limits.cold_start_s if snapshot.cold_start_s is None else snapshot.cold_start_s
    counts = _counts(state, snapshot.time_s)
    rate = _envelope_rate(counts, limits.target_wait_s)
    if len(state.windows) == NUM_WINDOWS:  # a model's first arrivals are not growth
        rate *= _growth(counts, cold_start_s)
    signals = {f"prompt tokens arrive at {rate:.0f}/s": math.ceil(rate / capacity)}
    return signals | _backlog_signal(snapshot, limits, counts, capacity, cold_start_s)


def _backlog_signal(
    snapshot: FleetSnapshot, limits: ScalingLimits, counts: list[float], capacity: float, cold_start_s: float
) -> dict[str, int]:
    """Return reason |-> replicas if the waiting prompt tokens take longer than the target wait."""
    ready = _ready(snapshot)
    backlog = snapshot.buffered_tokens + sum(each.queued_tokens for each in ready)
    wait_s = backlog / (capacity * max(1, len(ready)))
    if wait_s <= limits.target_wait_s:
        return {}
    mean_rate = _mean_rate(counts, NUM_TREND_COLD_STARTS * cold_start_s)
    # The backlog that is left when a replica that is started now is ready.
    left = max(0.0, backlog + (mean_rate - capacity * len(ready)) * cold_start_s)
    num_replicas = (mean_rate + left / limits.target_wait_s) / capacity
    return {f"{backlog} prompt tokens wait, which take {wait_s:.1f} s": math.ceil(num_replicas)}


def _counts(state: ScalingState, now: float) -> list[float]:
    """Return the prompt tokens that arrived in each window, latest first; the latest window is not complete."""
    number, counts = int(now // WINDOW_S), dict(state.windows)
    return [counts.get(number - age, 0) for age in range(NUM_WINDOWS)]


def _envelope_rate(counts: list[float], target_wait_s: float) -> float:
    """Return the lowest tokens per second with which no recent arrival would have waited longer than the target.

    Arrivals of s seconds may take s seconds and the target wait: the arrival curve of network calculus (Le Boudec and
    Thiran, 2001).
    """
    sums = accumulate(counts)
    return max(total / (i * WINDOW_S + target_wait_s) for i, total in enumerate(sums, 1))


def _mean_rate(counts: list[float], seconds: float) -> float:
    """Return the tokens per second over about that time; the latest, incomplete window is added to the others."""
    num_windows = min(max(1, round(seconds / WINDOW_S)), len(counts) - 1)
    return sum(counts[: num_windows + 1]) / (num_windows * WINDOW_S)


def _growth(counts: list[float], horizon_s: float) -> float:
    """Return the factor by which arrivals will have grown at the horizon, 1 to MAX_GROWTH, by a linear trend.

    Growth is the difference between the means of the later and the earlier half of the windows. Only the part beyond
    twice its standard error counts, so that bursts are not taken for growth.
    """
    complete = counts[1:]
    half = len(complete) // 2
    later, earlier = complete[:half], complete[half : 2 * half]
    error = math.sqrt((pvariance(later) + pvariance(earlier)) / half)
    grown = fmean(later) - fmean(earlier) - 2 * error
    if grown <= 0:
        return 1.0
    # The centers of the halves are `half` windows apart; the later center is `half / 2` windows before now.
    distance = (horizon_s + half * WINDOW_S / 2) / (half * WINDOW_S)
    return min(1.0 + grown * distance / fmean(later), MAX_GROWTH)


def _memory_signals(snapshot: FleetSnapshot, limits: ScalingLimits) -> dict[str, int]:
    ready = _ready(snapshot)
    kv_use, row_use = sum(each.kv_use for each in ready), sum(each.row_use for each in ready)
    return {
        f"KV memory of {kv_use:.2f} replicas is in use": math.ceil(kv_use / limits.target_memory_use),
        f"rows of {row_use:.2f} replicas are in use": math.ceil(row_use / limits.target_memory_use),
    }


def _waiting_signal(snapshot: FleetSnapshot, limits: ScalingLimits, current: int) -> dict[str, int]:
    """Return one replica more than now if a request waits for too long for a reason that no other signal shows."""
    ready = _ready(snapshot)
    longest_s = max((each.oldest_wait_s for each in ready), default=0.0)
    if longest_s > limits.target_wait_s and len(ready) >= current:
        return {f"a request has waited {longest_s:.1f} s": current + 1}
    return {}


def _record(
    recommendations: tuple[tuple[float, int], ...], now: float, recommended: int, window_s: float
) -> tuple[tuple[float, int], ...]:
    """Append a recommendation if it differs from the last; drop those that ended before the window."""
    if not recommendations or recommendations[-1][1] != recommended:
        recommendations = (*recommendations, (now, recommended))
    first = max((i for i, (at, _) in enumerate(recommendations) if at <= now - window_s), default=0)
    return recommendations[first:]


def _stabilize(recommended: int, now: float, limits: ScalingLimits, state: ScalingState) -> tuple[int, str]:
    """Return the target that delays, step limits and cooldown allow, and why it is held back, if it is."""
    current = state.target or 0
    bounded = limits.clamp(current)
    if bounded != current:  # the bounds have changed
        return bounded, ""
    if recommended > current:
        return _scale_up(current, recommended, now, limits, state)
    if recommended < current:
        return _scale_down(current, now, limits, state)
    return current, ""


def _scale_up(
    current: int, recommended: int, now: float, limits: ScalingLimits, state: ScalingState
) -> tuple[int, str]:
    if current == 0:  # without delay
        return min(recommended, limits.max_step_up), ""
    lowest = min(_recommendations_within(state.recommendations, now, limits.up_delay_s))
    if lowest <= current:
        return current, f"held for up_delay_s ({limits.up_delay_s:g} s)"
    return min(lowest, current + limits.max_step_up), ""


def _scale_down(current: int, now: float, limits: ScalingLimits, state: ScalingState) -> tuple[int, str]:
    highest = max(_recommendations_within(state.recommendations, now, limits.down_delay_s))
    if now - state.busy_at >= limits.idle_timeout_s:  # a delay of its own
        highest = limits.min_replicas
    if highest >= current:
        return current, f"held for down_delay_s ({limits.down_delay_s:g} s)"
    if now - state.changed_at < limits.cooldown_s:
        return current, f"held for cooldown_s ({limits.cooldown_s:g} s)"
    return max(highest, current - limits.max_step_down), ""


def _recommendations_within(
    recommendations: tuple[tuple[float, int], ...], now: float, delay_s: float
) -> Iterable[int]:
    """Return every recommendation that was in force at some time within the delay."""
    begin = now - delay_s
    ends = [at for at, _ in recommendations[1:]] + [math.inf]
    return [replicas for (_, replicas), end in zip(recommendations, ends, strict=True) if end > begin]


def _ready(snapshot: FleetSnapshot) -> list[ReplicaSample]:
    return [each for each in snapshot.replicas if each.state is ReplicaState.READY]


def _num_live(snapshot: FleetSnapshot) -> int:
    return sum(each.state in (ReplicaState.READY, ReplicaState.STARTING) for each in snapshot.replicas)


class DemandCounter:
    """One model's demand over all gateways.

    Attributes:
        cold_start_s: time that the latest replica needed to become ready; None if none was measured.
    """

    def __init__(self) -> None:
        self._num_requests = self._num_tokens = 0
        self._latest: dict[str, tuple[float, Demand]] = {}  # gateway_id |-> (time, its latest report)
        self.cold_start_s: float | None = None

    def add(self, gateway_id: str, demand: Demand, now: float) -> None:
        """Add a gateway's report."""
        self._num_requests += demand.num_requests
        self._num_tokens += demand.num_tokens
        self._latest[gateway_id] = now, demand

    def collect(self, now: float) -> Demand:
        """Return the requests that arrived since the last call, and those that wait now."""
        self._latest = {
            gateway_id: (at, demand)
            for gateway_id, (at, demand) in self._latest.items()
            if now - at < REPORT_LIFETIME_S and demand.num_waiting
        }
        num_requests, num_tokens = self._num_requests, self._num_tokens
        self._num_requests = self._num_tokens = 0
        return Demand(
            num_requests,
            num_tokens,
            sum(demand.num_waiting for _, demand in self._latest.values()),
            sum(demand.num_waiting_tokens for _, demand in self._latest.values()),
        )


def take_snapshot(
    now: float,
    replicas: Iterable[tuple[ReplicaState, ReplicaStatus | None]],
    demand: DemandCounter,
) -> FleetSnapshot:
    """Return the model's snapshot; resets the arrivals of `demand`.

    Args:
        replicas: (state, latest status) of each replica.
    """
    collected = demand.collect(now)
    ended = ReplicaState.STOPPED, ReplicaState.FAILED
    return FleetSnapshot(
        time_s=now,
        replicas=tuple(_sample(state, status) for state, status in replicas if state not in ended),
        buffered_requests=collected.num_waiting,
        buffered_tokens=collected.num_waiting_tokens,
        arrived_requests=collected.num_requests,
        arrived_tokens=collected.num_tokens,
        cold_start_s=demand.cold_start_s,
    )


def _sample(state: ReplicaState, status: ReplicaStatus | None) -> ReplicaSample:
    if status is None:
        return ReplicaSample(state)
    return ReplicaSample(
        state,
        queued_tokens=status.queued_tokens,
        num_requests=status.num_running + status.num_waiting,
        kv_use=status.kv_use,
        row_use=min(1.0, status.num_running / status.max_num_seqs),
        oldest_wait_s=status.oldest_wait_s,
        tokens_per_s=status.tokens_per_s,
    )
