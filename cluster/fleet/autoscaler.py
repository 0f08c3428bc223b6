"""How many replicas a model needs: a pure function of what is seen of them.

`decide` is called about once a second with a FleetSnapshot, and gets back the ScalingState that it returned the last
time. It holds nothing, reads no clock and starts nothing, so the same function is tested by itself, back-tested on
recorded traffic (``python -m benchmarks.autoscale``) and run by the fleet's controller.

What is wanted is the most that any of these asks for:

- **arrivals**: what came lately would all have been computed within the target, and so will what comes next, if it
  goes on growing as it did until a replica that is asked for now is there;
- **backlog**: prompt tokens that wait now, and those that will by then, are computed within the target;
- **memory**: KV blocks and rows in use, with room to spare;
- **waiting**: a request that has waited too long already.

How busy a GPU is says nothing: it is at 100 % with one sequence as with a hundred.

Wishes become the target as in the Kubernetes autoscaler: the target rises to what was wanted throughout `up_delay_s`
at least, and falls to what was wanted within `down_delay_s` at most, by limited steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import fmean, pvariance

from ..config.scaling_limits import ScalingLimits
from ..controller_api.fleet_state import ReplicaState

# Arrivals are counted in windows of this length, and so many of them are remembered.
WINDOW_S = 5.0
NUM_WINDOWS = 25
# Growth is trusted so far: arrivals are expected to become this many times what they are, at most.
MAX_GROWTH = 2.0
# What waits is expected to go on growing by the mean arrivals over so many cold starts: a burst shorter than that has
# passed before a replica asked for now could help with it.
NUM_TREND_COLD_STARTS = 2
# What a replica can compute in a second is the most that one has, less this share a second: a tenth in an hour.
CAPACITY_DECAY_PER_S = 3e-5


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """One replica in a snapshot; of one that is not ready, only its state counts.

    Attributes:
        queued_tokens: prompt tokens not computed yet.
        num_requests: sequences that run there or wait.
        kv_use, row_use: share of its KV blocks that running ones hold, and of the most that may run at once; 0 to 1.
        oldest_wait_s: how long the one has waited that waits longest.
        tokens_per_s: recent throughput, prompt and sampled tokens, in seconds in which it computed.
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
    """One model's part of the fleet at one time.

    Attributes:
        time_s: of a clock that only grows.
        replicas: all that have a process.
        buffered_requests, buffered_tokens: that wait at gateways because there is no replica to send them to.
        arrived_requests, arrived_tokens: prompt tokens, those that came since the last snapshot.
        cold_start_s: what the latest replica needed from being asked for to its canary; None: none was measured.
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
    """What `decide` remembers. A new one is as good: the fleet is as it is, and the rest is learned again.

    Attributes:
        target: the last one; None: there was none.
        windows: (number of the window, prompt tokens that came in it), the latest last.
        wishes: (time, replicas wanted), the latest last; each differs from the one before it.
        tokens_per_s: what a replica can compute; below 1: not known.
        time_s: of the last snapshot.
        changed_at: when the target last changed.
        busy_at: when there was last something to do.
    """

    target: int | None = None
    windows: tuple[tuple[int, int], ...] = ()
    wishes: tuple[tuple[float, int], ...] = ()
    tokens_per_s: float = 0.0
    time_s: float = 0.0
    changed_at: float = -math.inf
    busy_at: float = -math.inf


@dataclass(frozen=True, slots=True)
class Decision:
    """How many replicas there are to be (starting and ready ones together).

    Attributes:
        reason: why this many, for people.
        state: for the next call.
    """

    target: int
    reason: str
    state: ScalingState = field(repr=False, default_factory=ScalingState)


def decide(snapshot: FleetSnapshot, limits: ScalingLimits, state: ScalingState) -> Decision:
    """The next target. See the module's text."""
    state = _observe(snapshot, _begin(snapshot) if state.target is None else state)
    current = state.target or 0
    wanted, reason = _wish(snapshot, limits, state, current)
    wishes = _remember(state.wishes, snapshot.time_s, wanted, max(limits.up_delay_s, limits.down_delay_s))
    target, hold = _steady(current, wanted, wishes, snapshot.time_s, limits, state)
    if hold:
        reason = f"{hold}; {reason}"
    changed_at = snapshot.time_s if target != current else state.changed_at
    return Decision(target, reason, replace(state, target=target, wishes=wishes, changed_at=changed_at))


def _begin(snapshot: FleetSnapshot) -> ScalingState:
    """Without a memory, the replicas that live are taken to be those that are wanted."""
    now, current = snapshot.time_s, _num_live(snapshot)
    busy_at = now if current else -math.inf
    return ScalingState(target=current, wishes=((now, current),), time_s=now, busy_at=busy_at)


def _observe(snapshot: FleetSnapshot, state: ScalingState) -> ScalingState:
    """Arrivals, throughput and idleness, brought up to the snapshot."""
    now = snapshot.time_s
    number = int(now // WINDOW_S)
    windows = dict(state.windows)
    windows[number] = windows.get(number, 0) + snapshot.arrived_tokens
    kept = tuple(item for item in windows.items() if item[0] > number - NUM_WINDOWS)
    elapsed_s = max(0.0, now - state.time_s)
    shown = max((each.tokens_per_s for each in snapshot.replicas), default=0.0)
    capacity = max(shown, state.tokens_per_s * (1 - CAPACITY_DECAY_PER_S) ** elapsed_s)
    busy_at = now if _is_busy(snapshot) else state.busy_at
    return replace(state, windows=kept, tokens_per_s=capacity, time_s=now, busy_at=busy_at)


def _is_busy(snapshot: FleetSnapshot) -> bool:
    return bool(
        snapshot.arrived_requests
        or snapshot.buffered_requests
        or any(each.num_requests for each in snapshot.replicas)
    )


def _wish(
    snapshot: FleetSnapshot, limits: ScalingLimits, state: ScalingState, current: int
) -> tuple[int, str]:
    """How many replicas would be right now, within the bounds, and why."""
    if snapshot.time_s - state.busy_at >= limits.idle_timeout_s:
        return limits.min_replicas, f"no request for {limits.idle_timeout_s:g} s"
    wishes = {
        "it was asked for not long ago": 1,
        **_throughput_wishes(snapshot, limits, state),
        **_memory_wishes(snapshot, limits),
        **_waiting_wish(snapshot, limits, current),
    }
    reason, wanted = max(wishes.items(), key=lambda item: item[1])
    bounded = limits.clamp(wanted)
    if bounded == wanted:
        return bounded, reason
    bound = "min_replicas" if bounded > wanted else "max_replicas"
    return bounded, f"{bound} is {bounded}; {wanted} wanted: {reason}"


def _throughput_wishes(snapshot: FleetSnapshot, limits: ScalingLimits, state: ScalingState) -> dict[str, int]:
    """reason |-> replicas, by prompt tokens that come and that wait."""
    if state.tokens_per_s < 1.0:  # not known
        return {}
    capacity = state.tokens_per_s * limits.target_use
    ready = _ready(snapshot)
    cold_start_s = limits.cold_start_s if snapshot.cold_start_s is None else snapshot.cold_start_s
    counts = _counts(state, snapshot.time_s)
    rate = _envelope_rate(counts, limits.target_wait_s)
    if len(state.windows) == NUM_WINDOWS:  # a beginning is no growth
        rate *= _growth(counts, cold_start_s)
    wishes = {f"prompt tokens come at {rate:.0f}/s": math.ceil(rate / capacity)}
    backlog = snapshot.buffered_tokens + sum(each.queued_tokens for each in ready)
    wait_s = backlog / (capacity * max(1, len(ready)))
    if wait_s > limits.target_wait_s:
        mean_rate = _mean_rate(counts, NUM_TREND_COLD_STARTS * cold_start_s)
        # What is left by the time that a replica asked for now is there.
        left = max(0.0, backlog + (mean_rate - capacity * len(ready)) * cold_start_s)
        num_replicas = (mean_rate + left / limits.target_wait_s) / capacity
        wishes[f"{backlog} prompt tokens wait, which take {wait_s:.1f} s"] = math.ceil(num_replicas)
    return wishes


def _counts(state: ScalingState, now: float) -> list[float]:
    """Prompt tokens that came in each window, the latest first; that one has perhaps just begun."""
    number, counts = int(now // WINDOW_S), dict(state.windows)
    return [counts.get(number - age, 0) for age in range(NUM_WINDOWS)]


def _envelope_rate(counts: list[float], target_wait_s: float) -> float:
    """The least tokens a second at which nothing that came lately would have waited longer than the target.

    What comes within s seconds may take s and the target: the arrival curve of network calculus (Le Boudec and
    Thiran, 2001).
    """
    sums = accumulate(counts)
    return max(total / (i * WINDOW_S + target_wait_s) for i, total in enumerate(sums, 1))


def _mean_rate(counts: list[float], seconds: float) -> float:
    """Tokens a second over about so long; the latest window is complete only in part."""
    num_windows = min(max(1, round(seconds / WINDOW_S)), len(counts) - 1)
    return sum(counts[: num_windows + 1]) / (num_windows * WINDOW_S)


def _growth(counts: list[float], horizon_s: float) -> float:
    """How many times more is expected at the horizon, if arrivals go on growing as they did; 1 to MAX_GROWTH.

    Growth is the difference between the later and the earlier half of the windows. It counts as far as it exceeds
    twice its standard error: bursts are no growth.
    """
    complete = counts[1:]
    half = len(complete) // 2
    later, earlier = complete[:half], complete[half : 2 * half]
    error = math.sqrt((pvariance(later) + pvariance(earlier)) / half)
    grown = fmean(later) - fmean(earlier) - 2 * error
    if grown <= 0:
        return 1.0
    # The middles of the halves are half the windows apart; the later one is half as far from now.
    distance = (horizon_s + half * WINDOW_S / 2) / (half * WINDOW_S)
    return min(1.0 + grown * distance / fmean(later), MAX_GROWTH)


def _memory_wishes(snapshot: FleetSnapshot, limits: ScalingLimits) -> dict[str, int]:
    ready = _ready(snapshot)
    kv_use, row_use = sum(each.kv_use for each in ready), sum(each.row_use for each in ready)
    return {
        f"KV memory of {kv_use:.2f} replicas is in use": math.ceil(kv_use / limits.target_memory_use),
        f"rows of {row_use:.2f} replicas are in use": math.ceil(row_use / limits.target_memory_use),
    }


def _waiting_wish(snapshot: FleetSnapshot, limits: ScalingLimits, current: int) -> dict[str, int]:
    """One more than there are where requests wait too long although no other signal says why."""
    ready = _ready(snapshot)
    longest_s = max((each.oldest_wait_s for each in ready), default=0.0)
    if longest_s > limits.target_wait_s and len(ready) >= current:
        return {f"a request has waited {longest_s:.1f} s": current + 1}
    return {}


def _remember(
    wishes: tuple[tuple[float, int], ...], now: float, wanted: int, memory_s: float
) -> tuple[tuple[float, int], ...]:
    """Changes of the wish, as far back as the delays look; the one that held before them stays the first."""
    if not wishes or wishes[-1][1] != wanted:
        wishes = (*wishes, (now, wanted))
    first = max((i for i, (at, _) in enumerate(wishes) if at <= now - memory_s), default=0)
    return wishes[first:]


def _steady(
    current: int,
    wanted: int,
    wishes: tuple[tuple[float, int], ...],
    now: float,
    limits: ScalingLimits,
    state: ScalingState,
) -> tuple[int, str]:
    """The target that delays, steps and cool-down allow, and what holds it back."""
    bounded = limits.clamp(current)
    if bounded != current:  # the bounds have changed
        return bounded, ""
    if wanted > current:
        if current == 0:
            return min(wanted, limits.max_step_up), ""
        lasting = min(_within(wishes, now, limits.up_delay_s))
        if lasting <= current:
            return current, f"waits {limits.up_delay_s:g} s before it grows"
        return min(lasting, current + limits.max_step_up), ""
    if wanted < current:
        lasting = max(_within(wishes, now, limits.down_delay_s))
        if lasting >= current:
            return current, f"waits {limits.down_delay_s:g} s before it shrinks"
        if now - state.changed_at < limits.cooldown_s:
            return current, f"cools down for {limits.cooldown_s:g} s"
        return max(lasting, current - limits.max_step_down), ""
    return current, ""


def _within(wishes: tuple[tuple[float, int], ...], now: float, delay_s: float) -> Iterable[int]:
    """Every wish that held at some time within the delay."""
    begin = now - delay_s
    ends = [at for at, _ in wishes[1:]] + [math.inf]
    return [wanted for (_, wanted), end in zip(wishes, ends, strict=True) if end > begin]


def _ready(snapshot: FleetSnapshot) -> list[ReplicaSample]:
    return [each for each in snapshot.replicas if each.state is ReplicaState.READY]


def _num_live(snapshot: FleetSnapshot) -> int:
    return sum(each.state in (ReplicaState.READY, ReplicaState.STARTING) for each in snapshot.replicas)
