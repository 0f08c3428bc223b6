"""A fleet in simulated time, whose replicas start, serve and drain as an autoscaling policy decides.

The policy's input and decisions are real; replicas are simulated. Each of their steps computes a token budget (one
token per running sequence, then chunks of prompts in order of arrival) in the time of a roofline, within the rows and
the KV memory of the replica. Prefix caches, preemption and speculation are not simulated.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from benchmarks.replay import Roofline
from benchmarks.trace import Trace
from quire.cluster.fleet.controller.autoscaler import FleetSnapshot, ReplicaSample
from quire.cluster.fleet.controller.fleet_state import ReplicaState
from quire.cluster.gateway.routing.router import ReplicaLoad, Router

# Time between two calls of the policy.
DECISION_INTERVAL_S = 1.0
# Weight of the latest second in the throughput that a replica reports.
_RECENT = 0.3


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """Parameters of a simulated replica: a Llama of 8 billion parameters in bfloat16 on one NVIDIA L4.

    Attributes:
        roofline: half of the card's 121 dense TFLOP/s, 300 GB/s.
        num_kv_tokens: its 24 GB at 90 %, less the weights.
        cold_start_s: from the start to the first token, on a running node that has the weights.
    """

    roofline: Roofline = field(
        default_factory=lambda: Roofline(flops_per_s=60e12, weight_bytes=16e9, bytes_per_s=300e9)
    )
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    num_kv_tokens: int = 42_000
    cold_start_s: float = 30.0


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request and its times.

    Attributes:
        first_step_s: when the computation of its prompt began.
        first_token_s: when the computation of its prompt ended.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_left_tokens: int
    first_step_s: float | None = None
    first_token_s: float | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def wait_s(self) -> float:
        assert self.first_step_s is not None
        return self.first_step_s - self.arrival_s


class SimulatedReplica:
    """One replica; `step` simulates one step."""

    def __init__(self, replica_id: str, model: ReplicaModel, started_at: float) -> None:
        self.replica_id = replica_id
        self.started_at = started_at
        self.state = ReplicaState.STARTING
        self.is_stepping = False
        self._model = model
        self._waiting: deque[SimulatedRequest] = deque()
        self._prefilling: deque[SimulatedRequest] = deque()
        self._decoding: list[tuple[int, int, SimulatedRequest]] = []  # (last step, tie, request), a heap
        self._num_steps = 0
        self._ties = count()
        self._num_held_tokens = 0  # of KV memory, reserved for the full length of every output
        self._num_read_tokens = 0
        self.queued_tokens = 0
        self._tokens_per_s = 0.0

    @property
    def num_running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def num_requests(self) -> int:
        return len(self._waiting) + self.num_running

    @property
    def load(self) -> ReplicaLoad:
        return ReplicaLoad(self.queued_tokens, self._num_held_tokens / self._model.num_kv_tokens)

    def sample(self, now: float) -> ReplicaSample:
        """Return the replica as its status would report it."""
        return ReplicaSample(
            state=self.state,
            queued_tokens=self.queued_tokens,
            num_requests=self.num_requests,
            kv_use=self._num_held_tokens / self._model.num_kv_tokens,
            row_use=self.num_running / self._model.max_num_seqs,
            oldest_wait_s=now - self._waiting[0].arrival_s if self._waiting else 0.0,
            tokens_per_s=self._tokens_per_s,
        )

    def submit(self, request: SimulatedRequest) -> None:
        self._waiting.append(request)
        self.queued_tokens += request.num_prompt_tokens

    def hand_off(self) -> list[SimulatedRequest]:
        """Return the waiting requests of a draining replica, for other replicas."""
        waiting = list(self._waiting)
        self._waiting.clear()
        self.queued_tokens -= sum(request.num_prompt_tokens for request in waiting)
        return waiting

    def step(self, now: float) -> float:
        """Simulate a step that begins now; return its end."""
        budget = self._model.max_num_batched_tokens - len(self._decoding)
        num_decoded, done = len(self._decoding), []
        num_prefilled = 0
        while num_prefilled < budget and (self._prefilling or self._admit(now)):
            request = self._prefilling[0]
            chunk = min(request.num_left_tokens, budget - num_prefilled)
            request.num_left_tokens -= chunk
            num_prefilled += chunk
            if request.num_left_tokens == 0:
                done.append(self._prefilling.popleft())
        self.queued_tokens -= num_prefilled
        self._num_read_tokens += num_decoded
        seconds = self._model.roofline.step_s(
            num_decoded + num_prefilled, self._num_read_tokens + num_prefilled
        )
        self._note_throughput((num_decoded + num_prefilled) / seconds, seconds)
        end = now + seconds
        self._num_steps += 1
        for request in done:  # the step samples their first tokens
            request.first_token_s = end
            self._num_read_tokens += request.num_prompt_tokens
            last_step = self._num_steps + request.num_output_tokens - 1
            heapq.heappush(self._decoding, (last_step, next(self._ties), request))
        while self._decoding and self._decoding[0][0] <= self._num_steps:
            request = heapq.heappop(self._decoding)[2]
            self._num_held_tokens -= request.num_tokens
            self._num_read_tokens -= request.num_tokens - 1
        return end

    def _admit(self, now: float) -> bool:
        """Admit the next waiting request. Returns False if there is none, or no room for it."""
        if not self._waiting or self.num_running >= self._model.max_num_seqs:
            return False
        request = self._waiting[0]
        if self.num_running and self._num_held_tokens + request.num_tokens > self._model.num_kv_tokens:
            return False
        self._waiting.popleft()
        request.first_step_s = now
        self._num_held_tokens += request.num_tokens
        self._prefilling.append(request)
        return True

    def _note_throughput(self, tokens_per_s: float, seconds: float) -> None:
        """Update the exponential average over the time in which the replica computed."""
        weight = 1 - (1 - _RECENT) ** seconds
        self._tokens_per_s += weight * (tokens_per_s - self._tokens_per_s)


Policy = Callable[[FleetSnapshot], int]


@dataclass(slots=True)
class FleetRun:
    """Result of a policy.

    Attributes:
        requests: all requests of the trace.
        replica_seconds: summed over the replicas, from start to end.
        history: (time, replicas started, replicas ready), one entry per decision.
    """

    requests: list[SimulatedRequest]
    replica_seconds: float = 0.0
    history: list[tuple[float, int, int]] = field(default_factory=list)

    def within(self, target_wait_s: float) -> float:
        """Return the share of requests that waited at most `target_wait_s`."""
        return sum(request.wait_s <= target_wait_s for request in self.requests) / len(self.requests)


class SimulatedFleet:
    """Runs a trace under a policy.

    Args:
        policy: snapshot |-> number of replicas.
        num_replicas: ready replicas at the trace's begin.
    """

    def __init__(self, trace: Trace, policy: Policy, model: ReplicaModel, num_replicas: int) -> None:
        self._policy = policy
        self._model = model
        self._requests = [
            SimulatedRequest(
                each.arrival_s, each.num_prompt_tokens, each.num_output_tokens, each.num_prompt_tokens
            )
            for each in trace.requests
        ]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._router = Router(block_size=16, rng=random.Random(0))
        self._replicas: dict[str, SimulatedReplica] = {}
        self._buffer: deque[SimulatedRequest] = deque()
        self._num_arrived = self._num_arrived_tokens = 0
        self._run = FleetRun(self._requests)
        for _ in range(num_replicas):
            self._start(0.0).state = ReplicaState.READY

    def run(self) -> FleetRun:
        """Simulate until the last request has finished."""
        for request in self._requests:
            self._schedule(request.arrival_s, partial(self._arrive, request))
        self._schedule(0.0, self._decide)
        end = self._requests[-1].arrival_s
        while self._events and (self._events[0][0] <= end or self._num_unfinished):
            now, _, event = heapq.heappop(self._events)
            event(now)
        for replica in list(self._replicas.values()):
            self._end(replica, max(now, end))
        return self._run

    @property
    def _num_unfinished(self) -> int:
        return len(self._buffer) + sum(each.num_requests for each in self._replicas.values())

    def _schedule(self, time_s: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def _arrive(self, request: SimulatedRequest, now: float) -> None:
        self._num_arrived += 1
        self._num_arrived_tokens += request.num_prompt_tokens
        self._submit(request, now)

    def _submit(self, request: SimulatedRequest, now: float) -> None:
        loads = {each.replica_id: each.load for each in self._replicas_in(ReplicaState.READY)}
        if not loads:
            self._buffer.append(request)
            return
        self._router.set_loads(loads)
        chosen = self._router.choose((), b"")
        assert chosen is not None
        replica = self._replicas[chosen]
        replica.submit(request)
        self._keep_stepping(replica, now)

    def _keep_stepping(self, replica: SimulatedReplica, now: float) -> None:
        if not replica.is_stepping and replica.num_requests:
            replica.is_stepping = True
            self._schedule(replica.step(now), partial(self._after_step, replica))

    def _after_step(self, replica: SimulatedReplica, now: float) -> None:
        replica.is_stepping = False
        self._keep_stepping(replica, now)
        if replica.state is ReplicaState.DRAINING and not replica.num_requests:
            self._end(replica, now)

    def _decide(self, now: float) -> None:
        arrived, tokens = self._num_arrived, self._num_arrived_tokens
        self._num_arrived = self._num_arrived_tokens = 0
        snapshot = FleetSnapshot(
            time_s=now,
            replicas=tuple(replica.sample(now) for replica in self._replicas.values()),
            buffered_requests=len(self._buffer),
            buffered_tokens=sum(request.num_prompt_tokens for request in self._buffer),
            arrived_requests=arrived,
            arrived_tokens=tokens,
            cold_start_s=self._model.cold_start_s,
        )
        self._resize(self._policy(snapshot), now)
        starting, ready = (
            len(self._replicas_in(ReplicaState.STARTING)),
            len(self._replicas_in(ReplicaState.READY)),
        )
        self._run.history.append((now, starting + ready, ready))
        self._schedule(now + DECISION_INTERVAL_S, self._decide)

    def _resize(self, target: int, now: float) -> None:
        starting, ready = self._replicas_in(ReplicaState.STARTING), self._replicas_in(ReplicaState.READY)
        for _ in range(target - len(starting) - len(ready)):
            self._schedule(now + self._model.cold_start_s, partial(self._make_ready, self._start(now)))
        surplus = max(0, len(starting) + len(ready) - target)
        for replica in starting[::-1][:surplus]:
            self._end(replica, now)
        for replica in sorted(ready, key=lambda each: each.num_requests)[: max(0, surplus - len(starting))]:
            self._drain(replica, now)

    def _start(self, now: float) -> SimulatedReplica:
        replica = SimulatedReplica(f"replica-{next(self._order)}", self._model, now)
        self._replicas[replica.replica_id] = replica
        return replica

    def _make_ready(self, replica: SimulatedReplica, now: float) -> None:
        if replica.state is not ReplicaState.STARTING:
            return
        replica.state = ReplicaState.READY
        waiting = list(self._buffer)
        self._buffer.clear()
        for request in waiting:
            self._submit(request, now)

    def _drain(self, replica: SimulatedReplica, now: float) -> None:
        replica.state = ReplicaState.DRAINING
        for request in replica.hand_off():
            self._submit(request, now)
        if not replica.num_requests:
            self._end(replica, now)

    def _end(self, replica: SimulatedReplica, now: float) -> None:
        replica.state = ReplicaState.STOPPED
        del self._replicas[replica.replica_id]
        self._run.replica_seconds += now - replica.started_at

    def _replicas_in(self, state: ReplicaState) -> list[SimulatedReplica]:
        return [replica for replica in self._replicas.values() if replica.state is state]
