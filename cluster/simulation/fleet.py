"""SimulatedFleet: replicas, a gateway's router and the controller's decisions as events on one clock."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import count, pairwise

import numpy as np
import numpy.typing as npt

from ...proto.block_tables import IntArray
from ...proto.config import EngineConfig
from ...proto.digests import make_root, prefix_hashes
from ...proto.kv_transfer import KvOffer
from ...proto.replica_status import ReplicaStatus
from ...proto.sampling import SamplingParams
from ...proto.stream import Drain, Finish, FinishReason, Submit, TokenBatch
from ..config.deployment import ScalingLimits
from ..fleet.controller.autoscaler import (
    DemandCounter,
    FleetSnapshot,
    ScalingState,
    decide,
    take_snapshot,
)
from ..fleet.controller.fleet_state import Demand, ReplicaState
from ..fleet.controller.reconcile import ReplicaView, plan
from ..fleet.routing.prefill_split import PromptAt, PullRate, estimate_split
from ..fleet.routing.router import ReplicaLoad, Router
from .kv_network import KvNetwork
from .replica import SimulatedReplica
from .step_time import TimesSteps
from .traces import TracedRequest

# Interval of the replicas' statuses and cache reports, and of the autoscaler's decisions, as in a real fleet.
REPORT_S = 1.0
_VERSION = "simulated"
_GATEWAY_ID = "gateway"
_NO_TOKENS = np.zeros(0, np.int32)
_NO_TOKEN_YET = -math.inf

# snapshot |-> wanted replicas
Policy = Callable[[FleetSnapshot], int]
# (hashes of the prompt's blocks, replica_id |-> load) |-> replica_id
Choose = Callable[[Sequence[bytes], dict[str, ReplicaLoad]], str]


def autoscaling(limits: ScalingLimits) -> Policy:
    """Return `decide` with its state, as the controller calls it."""
    state = ScalingState()

    def policy(snapshot: FleetSnapshot) -> int:
        nonlocal state
        decision = decide(snapshot, limits, state)
        state = decision.state
        return decision.target

    return policy


@dataclass(slots=True)
class SimulatedRequest:
    """A request on its way, and its times.

    Attributes:
        replica_id: where it runs, or last ran.
        num_received, last_token_s: tokens of its output, and when the last came, once it has left a replica.
        first_token_s: None before the first.
        wait_s: until its prompt's computation began, once it `has_waited`.
        ended_at: None while it runs.
        error: why it failed; empty if it did not.
        kv: its blocks at the replica that computed its prompt, until the next one has been told.
        has_split: its prompt was, or is, computed by a replica of the prefill role.
        reader_id: the replica that reads its prompt's blocks meanwhile.
    """

    traced: TracedRequest
    replica_id: str = ""
    num_received: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    wait_s: float = 0.0
    has_waited: bool = False
    num_cached_tokens: int = 0
    ended_at: float | None = None
    error: str = ""
    kv: KvOffer | None = None
    has_split: bool = False
    reader_id: str = ""


class Watcher:
    """Sees what happens to requests. The methods do nothing; a subclass overrides those that it needs."""

    def on_first_token(self, request: SimulatedRequest, now: float) -> None:
        """A request got its first token."""

    def on_gap(self, seconds: float, count: int = 1) -> None:
        """So many requests got another token so long after the one before."""

    def on_gaps(self, gaps: Sequence[float], count: int) -> None:
        """Each of so many requests got another token after each of these times."""
        for seconds in gaps:
            self.on_gap(seconds, count)

    def on_end(self, request: SimulatedRequest) -> None:
        """A request ended: its times and its error are known."""


@dataclass(frozen=True, slots=True)
class PrefillRole:
    """Replicas that compute prompts for the other ones of a fleet, which have the decode role.

    Attributes:
        num_replicas: of these, beside the others; the fewest, with a policy.
        bytes_per_s: at which a rank reads KV from another replica.
        splits: prompts are sent to them where the cost model says so; without, they stay idle.
        policy: of their number; None keeps it.
    """

    num_replicas: int
    bytes_per_s: float
    splits: bool = True
    policy: Policy | None = None


class _Outputs:
    """Tokens of the requests that run, by handle: a step of 200 rows is counted in 10 us, one by one in 100."""

    def __init__(self) -> None:
        self._num_received = np.zeros(64, np.int64)
        self._last_s = np.zeros(64)

    def begin(self, handle: int, num_received: int, last_s: float | None) -> None:
        """Take up a request with the tokens that it has, the last of which came at `last_s`."""
        if handle >= self._last_s.size:
            self._num_received = np.append(self._num_received, np.zeros_like(self._num_received))
            self._last_s = np.append(self._last_s, np.zeros_like(self._last_s))
        self._num_received[handle] = num_received
        self._last_s[handle] = _NO_TOKEN_YET if last_s is None else last_s

    def add(self, handles: IntArray, now: float, count: int = 1) -> npt.NDArray[np.float64]:
        """Add tokens to each of distinct handles; return the times of their tokens before, or _NO_TOKEN_YET."""
        before: npt.NDArray[np.float64] = self._last_s[handles]
        self._num_received[handles] += count
        self._last_s[handles] = now
        return before

    def of(self, handle: int) -> tuple[int, float | None]:
        """Return the number of tokens of a request, and the time of the last."""
        last_s = float(self._last_s[handle])
        return int(self._num_received[handle]), None if last_s == _NO_TOKEN_YET else last_s


@dataclass(slots=True)
class _Part:
    """The replicas of one role, or all of them.

    Attributes:
        role: as in a fleet file.
        config: of each.
        policy: of their number; None keeps it.
        target: replicas that are wanted.
        loads: of the ready ones, as last reported and counted on.
    """

    role: str
    config: EngineConfig
    policy: Policy | None
    target: int
    router: Router
    demand: DemandCounter = field(default_factory=DemandCounter)
    loads: dict[str, ReplicaLoad] = field(default_factory=dict)

    @staticmethod
    def of(role: str, config: EngineConfig, policy: Policy | None, target: int) -> _Part:
        config = replace(config, cache=replace(config.cache, role=role))
        return _Part(role, config, policy, target, Router(config.cache.block_size, random.Random(0)))


@dataclass(slots=True)
class FleetCost:
    """Replicas of a run.

    Attributes:
        replica_seconds: summed over the replicas, from start to end.
        end_s: time of the last event.
        history: (time, replicas started, replicas ready), one entry per change.
        num_steps, num_preemptions: of all replicas.
        num_split: requests whose prompts were computed apart.
    """

    replica_seconds: float = 0.0
    end_s: float = 0.0
    history: list[tuple[float, int, int]] = field(default_factory=list)
    num_steps: int = 0
    num_preemptions: int = 0
    num_split: int = 0

    @property
    def most_replicas(self) -> int:
        return max((started for _, started, _ in self.history), default=0)


class SimulatedFleet:
    """Serves a trace. Everything that decides is the code that serves; see the package.

    Args:
        config: of each replica, with its number of KV blocks.
        num_replicas: that are ready at the trace's begin.
        policy: of the number of replicas; None keeps it.
        cold_start_s: from a replica's start to its first request.
        drain_grace_s: that running sequences of a draining replica have.
        choose: the routing; None for the gateway's.
        on_elapsed: called with (replica, seconds) before each result of a step.
        joins_steps: equal steps are planned and applied at once, which changes no figure and saves most of the time.
        prefill: replicas of another role; None without.
    """

    def __init__(
        self,
        config: EngineConfig,
        step_time: TimesSteps,
        watcher: Watcher,
        *,
        num_replicas: int = 1,
        policy: Policy | None = None,
        cold_start_s: float = 60.0,
        drain_grace_s: float = 30.0,
        choose: Choose | None = None,
        on_elapsed: Callable[[SimulatedReplica, float], None] | None = None,
        joins_steps: bool = True,
        prefill: PrefillRole | None = None,
    ) -> None:
        self._prefill = prefill
        self._network = None if prefill is None else KvNetwork(prefill.bytes_per_s)
        self._whole = _Part.of("both" if prefill is None else "decode", config, policy, num_replicas)
        self._parts = [self._whole]
        if prefill is not None:
            self._helpers = _Part.of("prefill", config, prefill.policy, prefill.num_replicas)
            self._parts.append(self._helpers)
        self._part_of: dict[str, _Part] = {}  # replica_id |-> its part
        self._statuses: dict[str, ReplicaStatus] = {}  # as last reported
        self._config, self._step_time, self._watcher = config, step_time, watcher
        self._cold_start_s, self._drain_grace_s = cold_start_s, drain_grace_s
        self._on_elapsed = on_elapsed
        # Reads of KV are results of steps, so that no step is like the one before.
        self._joins_steps = joins_steps and prefill is None
        # Heaps: turns of replicas, which send no replica a message unless one drains, and all other events.
        self._turns: list[tuple[float, int, Callable[[float], None]]] = []
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._choose: Choose = self._route if choose is None else choose
        self._root = make_root(config.model.name)
        self.replicas: dict[str, SimulatedReplica] = {}
        self._buffer: deque[SimulatedRequest] = deque()
        self._running: dict[int, SimulatedRequest] = {}  # handle |-> request
        self._num_moving = 0  # between two replicas
        self._num_draining = 0
        self._free_handles: list[int] = []
        self._outputs = _Outputs()
        self._cost = FleetCost()
        self._arrivals: Iterator[TracedRequest] = iter(())
        self._has_arrivals = True
        for part in self._parts:
            part.demand.cold_start_s = cold_start_s
            for _ in range(part.target):
                replica = self._start(part, 0.0)
                replica.state = ReplicaState.READY
                part.loads[replica.replica_id] = ReplicaLoad(0, 0.0)

    def run(self, requests: Iterable[TracedRequest]) -> FleetCost:
        """Serve the requests, in order of their arrival, until the last has ended."""
        self._arrivals = iter(requests)
        self._schedule_arrival()
        now = 0.0
        self._tick(now)
        while self._has_arrivals or self._running or self._buffer or self._num_moving:
            is_turn = bool(self._turns) and (not self._events or self._turns[0] < self._events[0])
            now, _, event = heapq.heappop(self._turns if is_turn else self._events)
            event(now)
        for replica in list(self.replicas.values()):
            self._end(replica, now)
        self._cost.end_s = now
        return self._cost

    def _at(self, time_s: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    # Requests

    def _schedule_arrival(self) -> None:
        traced = next(self._arrivals, None)
        self._has_arrivals = traced is not None
        if traced is not None:
            self._at(traced.arrival_s, partial(self._arrive, traced))

    def _arrive(self, traced: TracedRequest, now: float) -> None:
        request = SimulatedRequest(traced)
        self._submit(request, now)
        num_tokens = traced.num_prompt_tokens
        demand = Demand(1, num_tokens, num_prefill_tokens=num_tokens if request.has_split else 0)
        for part in self._parts:
            part.demand.add(_GATEWAY_ID, demand.of_role(part.role), now)
        self._schedule_arrival()

    def _submit(self, request: SimulatedRequest, now: float) -> None:
        if not self._whole.loads:
            self._buffer.append(request)
            return
        caches = self._config.cache.prefix_caching
        prompt = request.traced.prompt() if caches else np.zeros(request.traced.num_prompt_tokens, np.int32)
        hashes = (
            prefix_hashes(prompt, self._config.cache.block_size, self._root) if self._routes_by_prefix else ()
        )
        chosen = (
            self._choose(hashes, self._whole.loads)
            if len(self._whole.loads) > 1
            else next(iter(self._whole.loads))
        )
        num_cached = 0
        if hashes:
            num_cached = self._config.cache.block_size * self._whole.router.num_cached_blocks(chosen, hashes)
            self._whole.router.record_submit(chosen, hashes)
        # Like the gateway, count the tokens sent since the replica's last report.
        num_new = request.traced.num_prompt_tokens - num_cached
        splits_to = self._split(request, hashes, chosen, num_new)
        if splits_to is not None:
            self._cost.num_split += 1
            request.has_split, request.reader_id, chosen = True, chosen, splits_to
        else:
            _count_sent(self._whole.loads, chosen, self._config.cache.block_size if request.kv else num_new)
        handle = self._free_handles.pop() if self._free_handles else len(self._running)
        self._running[handle] = request
        self._outputs.begin(handle, request.num_received, request.last_token_s)
        request.replica_id = chosen
        generated = np.zeros(request.num_received, np.int32) if request.num_received else _NO_TOKENS
        sampling = _sampling(request.traced.num_output_tokens)
        replica = self.replicas[chosen]
        replica.post(
            Submit(
                handle,
                f"request-{request.traced.number}",
                prompt,
                generated_token_ids=generated,
                sampling=sampling,
                kv=request.kv,
                prefill_only=splits_to is not None,
            )
        )
        request.kv = None
        self._wake(replica, now)

    def _split(
        self, request: SimulatedRequest, hashes: Sequence[bytes], decode: str, num_uncached: int
    ) -> str | None:
        """Return the replica that should compute the prompt for another one, as the gateway decides; or None."""
        if self._prefill is None or request.has_split or request.traced.num_output_tokens == 1:
            return None
        own, loads = self._statuses.get(decode), self._helpers.loads
        if not self._prefill.splits or own is None:
            return None
        self._helpers.router.set_loads(loads)
        helper = self._helpers.router.choose(hashes, b"")
        other = None if helper is None else self._statuses.get(helper)
        if helper is None or other is None:
            return None
        block_size = self._config.cache.block_size
        num_there = request.traced.num_prompt_tokens - block_size * self._helpers.router.num_cached_blocks(
            helper, hashes
        )
        # The loads have what was sent since the statuses.
        estimate = estimate_split(
            PromptAt.of(own, self._whole.loads[decode].queued_tokens - own.queued_tokens, num_uncached),
            PromptAt.of(other, loads[helper].queued_tokens - other.queued_tokens, num_there),
            PullRate.of(own),
        )
        if estimate is None or not estimate.pays:
            return None
        self._helpers.router.record_submit(helper, hashes)
        _count_sent(loads, helper, num_there)
        return helper

    @property
    def _routes_by_prefix(self) -> bool:
        return self._config.cache.prefix_caching and (len(self._whole.loads) > 1 or self._prefill is not None)

    def _route(self, hashes: Sequence[bytes], loads: dict[str, ReplicaLoad]) -> str:
        self._whole.router.set_loads(loads)
        chosen = self._whole.router.choose(hashes, b"")
        assert chosen is not None, "no replica takes requests"
        return chosen

    def _on_tokens(self, replica: SimulatedReplica, now: float, batch: TokenBatch) -> None:
        self._count_tokens(batch.handles, now)
        for lent in batch.lent:
            self._fetch(self._running[lent.handle], lent.kv, now)
        for finish in batch.finished:
            request = self._running.pop(finish.handle)
            request.num_received, request.last_token_s = self._outputs.of(finish.handle)
            self._on_finish(request, finish, now)
            self._free_handles.append(finish.handle)

    def _fetch(self, request: SimulatedRequest, kv: KvOffer, now: float) -> None:
        """Have the replica that will continue a request read the blocks of its prompt that are there."""
        reader = self.replicas.get(request.reader_id)
        if reader is not None:
            name, sampling = f"request-{request.traced.number}", SamplingParams(max_tokens=1)
            reader.post(Submit(0, name, request.traced.prompt(), sampling=sampling, kv=kv, fetch_only=True))
            self._wake(reader, now)

    def _count_tokens(self, handles: IntArray, now: float) -> None:
        """Count a token of each handle. Rows that decode have the same gap, which is counted once."""
        # time of the token before |-> number of tokens
        gaps = Counter(self._outputs.add(handles, now).tolist())
        if gaps.pop(_NO_TOKEN_YET, 0):
            for handle in handles.tolist():
                request = self._running[handle]
                if request.first_token_s is None:
                    request.first_token_s = now
                    self._watcher.on_first_token(request, now)
        for before, num_tokens in gaps.items():
            self._watcher.on_gap(now - before, num_tokens)

    def _on_equal_steps(self, handles: IntArray, times: Sequence[float]) -> None:
        self._count_tokens(handles, times[0])
        if len(times) > 1:
            self._watcher.on_gaps([now - before for before, now in pairwise(times)], handles.size)
            self._outputs.add(handles, times[-1], len(times) - 1)

    def _on_finish(self, request: SimulatedRequest, finish: Finish, now: float) -> None:
        if not request.has_waited and request.first_token_s is not None:
            request.has_waited = True
            request.wait_s = request.first_token_s - request.traced.arrival_s - finish.timings.prefill_s
        if finish.reason is FinishReason.MOVED:
            request.kv, request.num_cached_tokens = finish.kv, finish.num_cached_tokens
            self._num_moving += 1
            self._at(now, partial(self._move, request))
            return
        if not request.has_split:  # otherwise the blocks that it brought count as cached
            request.num_cached_tokens = finish.num_cached_tokens
        request.ended_at = now
        if finish.reason is FinishReason.ERROR:
            request.error = finish.error_reason or finish.grpc_status
        self._watcher.on_end(request)

    def _move(self, request: SimulatedRequest, now: float) -> None:
        self._num_moving -= 1
        self._submit(request, now)

    # Replicas

    def _wake(self, replica: SimulatedReplica, now: float) -> None:
        """Have a replica that has something to do take its next turn."""
        if not replica.is_stepping:
            replica.is_stepping = True
            self._turn_at(now, replica)

    def _turn_at(self, time_s: float, replica: SimulatedReplica) -> None:
        event: Callable[[float], None] = partial(self._turn, replica)
        heapq.heappush(self._turns, (time_s, next(self._order), event))

    def _turn(self, replica: SimulatedReplica, now: float) -> None:
        next_at = replica.turn(now, self._quiet_until)
        if next_at is not None:
            self._turn_at(next_at, replica)
            return
        replica.is_stepping = False
        if replica.state is ReplicaState.DRAINING:
            self._end(replica, now)

    @property
    def _quiet_until(self) -> float:
        """Return the time until which no replica gets a message: the next event, as far as that can send one."""
        if self._num_draining:
            return 0.0  # each of its steps may hand off requests
        return self._events[0][0] if self._events else math.inf

    def _tick(self, now: float) -> None:
        """Read the replicas' reports, decide on their number, and carry out the controller's plan."""
        is_routed = len(self.replicas) > 1 or self._prefill is not None
        scales = any(part.policy is not None for part in self._parts)
        statuses = {}
        if is_routed or scales:
            statuses = {replica_id: each.status(now) for replica_id, each in self.replicas.items()}
        self._statuses = statuses
        for part in self._parts:
            for replica_id in part.loads:
                if replica_id in statuses:
                    status = statuses[replica_id]
                    part.loads[replica_id] = ReplicaLoad(status.queued_tokens, status.kv_use)
                if is_routed and self._routes_by_prefix:
                    part.router.apply_report(replica_id, self.replicas[replica_id].report())
        for part in self._parts:
            self._scale(part, now)
        if scales or is_routed:
            self._at(now + REPORT_S, self._tick)

    def _scale(self, part: _Part, now: float) -> None:
        """Decide on the number of a part's replicas."""
        if part.policy is None:
            return
        if part is self._whole:
            num_tokens = sum(each.traced.num_prompt_tokens for each in self._buffer)
            part.demand.add(_GATEWAY_ID, Demand(0, 0, len(self._buffer), num_tokens), now)
        pairs = [(each.state, self._statuses.get(each.replica_id)) for each in self._replicas_of(part)]
        part.target = part.policy(take_snapshot(now, pairs, part.demand))
        self._reconcile(part, now)

    def _replicas_of(self, part: _Part) -> list[SimulatedReplica]:
        return [each for replica_id, each in self.replicas.items() if self._part_of[replica_id] is part]

    def _reconcile(self, part: _Part, now: float) -> None:
        views = [
            ReplicaView(each.replica_id, _VERSION, each.state, each.started_at, each.num_requests)
            for each in self._replicas_of(part)
        ]
        actions = plan(part.target, _VERSION, views, now)
        for _ in range(actions.num_starts):
            self._at(now + self._cold_start_s, partial(self._make_ready, self._start(part, now)))
        for replica_id in actions.stop:
            self._end(self.replicas[replica_id], now)
        for replica_id in actions.drain:
            self._drain(self.replicas[replica_id], now)
        self._note(now)

    def _start(self, part: _Part, now: float) -> SimulatedReplica:
        replica_id = f"{'prefill' if part.role == 'prefill' else 'replica'}-{next(self._order)}"
        replica = SimulatedReplica(
            replica_id,
            part.config,
            self._step_time,
            self._on_tokens,
            now,
            self._on_elapsed,
            self._on_equal_steps if self._joins_steps else None,
            self._network,
        )
        self.replicas[replica_id], self._part_of[replica_id] = replica, part
        return replica

    def _make_ready(self, replica: SimulatedReplica, now: float) -> None:
        if replica.state is not ReplicaState.STARTING:
            return
        replica.state = ReplicaState.READY
        self._part_of[replica.replica_id].loads[replica.replica_id] = ReplicaLoad(0, 0.0)
        self._note(now)
        waiting, self._buffer = self._buffer, deque()
        for request in waiting:
            self._submit(request, now)

    def _drain(self, replica: SimulatedReplica, now: float) -> None:
        replica.state = ReplicaState.DRAINING
        self._num_draining += 1
        del self._part_of[replica.replica_id].loads[replica.replica_id]
        replica.post(Drain(self._drain_grace_s))
        self._wake(replica, now)

    def _end(self, replica: SimulatedReplica, now: float) -> None:
        self._num_draining -= replica.state is ReplicaState.DRAINING
        replica.state = ReplicaState.STOPPED
        del self.replicas[replica.replica_id]
        part = self._part_of.pop(replica.replica_id)
        part.loads.pop(replica.replica_id, None)
        part.router.remove_replica(replica.replica_id)
        if self._network is not None:
            self._network.peers.pop(replica.replica_id, None)
        stats = replica.scheduler.stats
        self._cost.num_steps += stats.num_steps
        self._cost.num_preemptions += stats.num_preemptions
        self._cost.replica_seconds += now - replica.started_at
        self._note(now)

    def _note(self, now: float) -> None:
        ready = sum(each.state is ReplicaState.READY for each in self.replicas.values())
        starting = sum(each.state is ReplicaState.STARTING for each in self.replicas.values())
        entry = now, starting + ready, ready
        if not self._cost.history or self._cost.history[-1][1:] != entry[1:]:
            self._cost.history.append(entry)


@lru_cache(1024)
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True)


def _count_sent(loads: dict[str, ReplicaLoad], replica_id: str, num_tokens: int) -> None:
    """Count the tokens sent since the replica's last report, like the gateway."""
    load = loads[replica_id]
    loads[replica_id] = ReplicaLoad(load.queued_tokens + num_tokens, load.kv_use)
