"""SimulatedFleet: replicas, a gateway's router and the controller's decisions as events on one clock."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import numpy as np

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
from ..fleet.routing.prefill_split import PromptAt, estimate_split
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
        num_received: tokens of its output so far.
        first_token_s, last_token_s: of its output; None before the first.
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

    def on_end(self, request: SimulatedRequest) -> None:
        """A request ended: its times and its error are known."""


@dataclass(frozen=True, slots=True)
class PrefillRole:
    """Replicas that compute prompts for the other ones of a fleet, which have the decode role.

    Attributes:
        num_replicas: of these, beside the others.
        bytes_per_s: at which a rank reads KV from another replica.
        splits: prompts are sent to them where the cost model says so; without, they stay idle.
    """

    num_replicas: int
    bytes_per_s: float
    splits: bool = True


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
        prefill: replicas of another role, in a fleet whose number of replicas stays; None without.
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
        self._prefill_router = Router(config.cache.block_size, random.Random(0))
        self._prefill_loads: dict[str, ReplicaLoad] = {}  # as `_loads`, of the replicas with that role
        self._statuses: dict[str, ReplicaStatus] = {}  # as last reported
        if prefill is not None:
            config = _with_role(config, "decode")
        self._config, self._step_time, self._watcher = config, step_time, watcher
        self._policy, self._num_replicas = policy, num_replicas
        self._cold_start_s, self._drain_grace_s = cold_start_s, drain_grace_s
        self._on_elapsed = on_elapsed
        # Reads of KV are results of steps, so that no step is like the one before.
        self._joins_steps = joins_steps and prefill is None
        # Heaps: turns of replicas, which send no replica a message unless one drains, and all other events.
        self._turns: list[tuple[float, int, Callable[[float], None]]] = []
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._router = Router(config.cache.block_size, random.Random(0))
        self._choose: Choose = self._route if choose is None else choose
        self._root = make_root(config.model.name)
        self.replicas: dict[str, SimulatedReplica] = {}
        self._loads: dict[str, ReplicaLoad] = {}  # of the ready ones, as last reported and counted on
        self._demand = DemandCounter()
        self._demand.cold_start_s = cold_start_s
        self._buffer: deque[SimulatedRequest] = deque()
        self._running: dict[int, SimulatedRequest] = {}  # handle |-> request
        self._num_moving = 0  # between two replicas
        self._num_draining = 0
        self._free_handles: list[int] = []
        self._cost = FleetCost()
        self._arrivals: Iterator[TracedRequest] = iter(())
        self._has_arrivals = True
        self._target = num_replicas
        for _ in range(num_replicas):
            self._start(0.0).state = ReplicaState.READY
        for _ in range(0 if prefill is None else prefill.num_replicas):
            self._start_prefill().state = ReplicaState.READY

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
        self._demand.add(_GATEWAY_ID, Demand(1, traced.num_prompt_tokens), now)
        self._submit(request, now)
        self._schedule_arrival()

    def _submit(self, request: SimulatedRequest, now: float) -> None:
        if not self._loads:
            self._buffer.append(request)
            return
        caches = self._config.cache.prefix_caching
        prompt = request.traced.prompt() if caches else np.zeros(request.traced.num_prompt_tokens, np.int32)
        hashes = (
            prefix_hashes(prompt, self._config.cache.block_size, self._root) if self._routes_by_prefix else ()
        )
        chosen = self._choose(hashes, self._loads) if len(self._loads) > 1 else next(iter(self._loads))
        num_cached = 0
        if hashes:
            num_cached = self._config.cache.block_size * self._router.num_cached_blocks(chosen, hashes)
            self._router.record_submit(chosen, hashes)
        # Like the gateway, count the tokens sent since the replica's last report.
        num_new = request.traced.num_prompt_tokens - num_cached
        splits_to = self._split(request, hashes, chosen, num_new)
        if splits_to is not None:
            self._cost.num_split += 1
            request.has_split, request.reader_id, chosen = True, chosen, splits_to
        else:
            _count_sent(self._loads, chosen, self._config.cache.block_size if request.kv else num_new)
        handle = self._free_handles.pop() if self._free_handles else len(self._running)
        self._running[handle] = request
        request.replica_id = chosen
        generated = np.zeros(request.num_received, np.int32) if request.num_received else _NO_TOKENS
        sampling = SamplingParams(max_tokens=request.traced.num_output_tokens, seed=0, ignore_eos=True)
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
        own, loads = self._statuses.get(decode), self._prefill_loads
        if not self._prefill.splits or own is None or not own.kv_token_bytes:
            return None
        self._prefill_router.set_loads(loads)
        helper = self._prefill_router.choose(hashes, b"")
        other = None if helper is None else self._statuses.get(helper)
        if helper is None or other is None:
            return None
        block_size = self._config.cache.block_size
        num_there = request.traced.num_prompt_tokens - block_size * self._prefill_router.num_cached_blocks(
            helper, hashes
        )
        # The loads have what was sent since the statuses.
        estimate = estimate_split(
            PromptAt.of(own, self._loads[decode].queued_tokens - own.queued_tokens, num_uncached),
            PromptAt.of(other, loads[helper].queued_tokens - other.queued_tokens, num_there),
            own.kv_pull_bytes_per_s / own.kv_token_bytes,
        )
        if estimate is None or not estimate.pays:
            return None
        self._prefill_router.record_submit(helper, hashes)
        _count_sent(loads, helper, num_there)
        return helper

    @property
    def _routes_by_prefix(self) -> bool:
        return self._config.cache.prefix_caching and (len(self._loads) > 1 or self._prefill is not None)

    def _route(self, hashes: Sequence[bytes], loads: dict[str, ReplicaLoad]) -> str:
        self._router.set_loads(loads)
        chosen = self._router.choose(hashes, b"")
        assert chosen is not None, "no replica takes requests"
        return chosen

    def _on_tokens(self, replica: SimulatedReplica, now: float, batch: TokenBatch) -> None:
        self._count_tokens(batch.handles, now)
        for lent in batch.lent:
            self._fetch(self._running[lent.handle], lent.kv, now)
        for finish in batch.finished:
            self._on_finish(self._running.pop(finish.handle), finish, now)
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
        gaps: dict[float, int] = {}  # time of the token before |-> number of tokens
        for handle in handles.tolist():
            request = self._running[handle]
            request.num_received += 1
            before = request.last_token_s
            if before is None:
                request.first_token_s = now
                self._watcher.on_first_token(request, now)
            else:
                gaps[before] = gaps.get(before, 0) + 1
            request.last_token_s = now
        for before, num_tokens in gaps.items():
            self._watcher.on_gap(now - before, num_tokens)

    def _on_equal_steps(self, handles: IntArray, times: list[float]) -> None:
        self._count_tokens(handles, times[0])
        before = times[0]
        for now in times[1:]:
            self._watcher.on_gap(now - before, handles.size)
            before = now
        for handle in handles.tolist():
            request = self._running[handle]
            request.num_received += len(times) - 1
            request.last_token_s = before

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
        statuses = {}
        if is_routed or self._policy is not None:
            statuses = {replica_id: each.status(now) for replica_id, each in self.replicas.items()}
        self._statuses = statuses
        for loads, router in ((self._loads, self._router), (self._prefill_loads, self._prefill_router)):
            for replica_id in loads:
                if replica_id in statuses:
                    status = statuses[replica_id]
                    loads[replica_id] = ReplicaLoad(status.queued_tokens, status.kv_use)
                if is_routed and self._routes_by_prefix:
                    router.apply_report(replica_id, self.replicas[replica_id].report())
        if self._policy is not None:
            num_tokens = sum(each.traced.num_prompt_tokens for each in self._buffer)
            self._demand.add(_GATEWAY_ID, Demand(0, 0, len(self._buffer), num_tokens), now)
            pairs = [(each.state, statuses.get(replica_id)) for replica_id, each in self.replicas.items()]
            self._target = self._policy(take_snapshot(now, pairs, self._demand))
            self._reconcile(now)
        if self._policy is not None or is_routed:
            self._at(now + REPORT_S, self._tick)

    def _reconcile(self, now: float) -> None:
        views = [
            ReplicaView(each.replica_id, _VERSION, each.state, each.started_at, each.num_requests)
            for each in self.replicas.values()
        ]
        actions = plan(self._target, _VERSION, views, now)
        for _ in range(actions.num_starts):
            self._at(now + self._cold_start_s, partial(self._make_ready, self._start(now)))
        for replica_id in actions.stop:
            self._end(self.replicas[replica_id], now)
        for replica_id in actions.drain:
            self._drain(self.replicas[replica_id], now)
        self._note(now)

    def _start(self, now: float) -> SimulatedReplica:
        replica_id = f"replica-{next(self._order)}"
        replica = SimulatedReplica(
            replica_id,
            self._config,
            self._step_time,
            self._on_tokens,
            now,
            self._on_elapsed,
            self._on_equal_steps if self._joins_steps else None,
            self._network,
        )
        self.replicas[replica_id] = replica
        if now == 0.0 and len(self.replicas) <= self._num_replicas:
            self._loads[replica_id] = ReplicaLoad(0, 0.0)
        return replica

    def _start_prefill(self) -> SimulatedReplica:
        replica_id = f"prefill-{next(self._order)}"
        config = _with_role(self._config, "prefill")
        replica = self.replicas[replica_id] = SimulatedReplica(
            replica_id, config, self._step_time, self._on_tokens, 0.0, self._on_elapsed, network=self._network
        )
        self._prefill_loads[replica_id] = ReplicaLoad(0, 0.0)
        return replica

    def _make_ready(self, replica: SimulatedReplica, now: float) -> None:
        if replica.state is not ReplicaState.STARTING:
            return
        replica.state = ReplicaState.READY
        self._loads[replica.replica_id] = ReplicaLoad(0, 0.0)
        self._note(now)
        waiting, self._buffer = self._buffer, deque()
        for request in waiting:
            self._submit(request, now)

    def _drain(self, replica: SimulatedReplica, now: float) -> None:
        replica.state = ReplicaState.DRAINING
        self._num_draining += 1
        del self._loads[replica.replica_id]
        replica.post(Drain(self._drain_grace_s))
        self._wake(replica, now)

    def _end(self, replica: SimulatedReplica, now: float) -> None:
        self._num_draining -= replica.state is ReplicaState.DRAINING
        replica.state = ReplicaState.STOPPED
        del self.replicas[replica.replica_id]
        self._loads.pop(replica.replica_id, None)
        self._router.remove_replica(replica.replica_id)
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


def _with_role(config: EngineConfig, role: str) -> EngineConfig:
    return replace(config, cache=replace(config.cache, role=role))


def _count_sent(loads: dict[str, ReplicaLoad], replica_id: str, num_tokens: int) -> None:
    """Count the tokens sent since the replica's last report, like the gateway."""
    load = loads[replica_id]
    loads[replica_id] = ReplicaLoad(load.queued_tokens + num_tokens, load.kv_use)
