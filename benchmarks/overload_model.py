"""One replica under a load of requests with deadlines, in simulated time.

Scheduler and StepLoop are the real ones; `SimulatedRanks` give steps the time of a roofline. Requests arrive
independently of each other at given rates. The output of a request ends at a length that only the simulation knows,
as if the gateway had found a stop string there, or by its max_tokens.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.replay import ReplicaModel
from quire.cluster.simulation.replica import SimulatedClock, SimulatedRanks
from quire.cluster.simulation.traces import FIRST_TOKEN, VOCAB_SIZE
from quire.proto.errors import Overloaded
from quire.proto.sampling import SamplingParams
from quire.proto.stream import Finish, FinishReason, GatewayMessage, ReplicaMessage, Stop, Submit, TokenBatch
from quire.scheduler.core.scheduler import Scheduler
from quire.scheduler.service.loop import StepLoop

GATEWAY = b"load"
OVERLOADED = Overloaded.grpc_status


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the load.

    Attributes:
        rate: requests per second, of each tenant by its share.
    """

    seconds: float
    rate: float


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive independently of each other.

    Attributes:
        timeout_s: time that each client waits for its whole output; None if clients wait without limit.
        mean_prompt_tokens, mean_output_tokens: of lognormal lengths with `sigma`.
        max_tokens_factor: the caller's max_tokens over the length at which the output ends; 1 if it ends by length.
        tenants: tenant |-> its share of the requests.
        retries: a refused client waits for the delay that the error names, and then sends its request again as long
            as it has time for that.
    """

    phases: tuple[Phase, ...]
    timeout_s: float | None = None
    mean_prompt_tokens: float = 300.0
    mean_output_tokens: float = 120.0
    sigma: float = 0.6
    max_tokens_factor: float = 1.0
    tenants: tuple[tuple[str, float], ...] = (("", 1.0),)
    retries: bool = False
    seed: int = 0


@dataclass(slots=True)
class Call:
    """One call of the load.

    Attributes:
        done_at: when its last token came; None if it was refused or did not end.
        error: gRPC status of its failure, the last one if it was sent again; empty without one.
    """

    number: int
    arrived_at: float
    tenant: str
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    timeout_s: float | None
    num_received: int = 0
    done_at: float | None = None
    ended_at: float | None = None
    error: str = ""

    @property
    def is_good(self) -> bool:
        """Return whether the whole output came in time."""
        if self.done_at is None:
            return False
        return self.timeout_s is None or self.done_at - self.arrived_at <= self.timeout_s


def make_calls(load: Load) -> Iterator[Call]:
    """Yield the calls of a load in order of arrival."""
    rng = np.random.default_rng(load.seed)
    names = [name for name, _ in load.tenants]
    shares = np.array([share for _, share in load.tenants])
    start, numbers = 0.0, itertools.count()
    for phase in load.phases:
        now, end = start, start + phase.seconds
        while (now := now + rng.exponential(1.0 / phase.rate)) < end:
            num_prompt = _length(rng, load.mean_prompt_tokens, load.sigma)
            num_output = _length(rng, load.mean_output_tokens, load.sigma)
            yield Call(
                number=next(numbers),
                arrived_at=now,
                tenant=names[int(rng.choice(len(names), p=shares / shares.sum()))],
                num_prompt_tokens=num_prompt,
                num_output_tokens=num_output,
                max_tokens=max(num_output, round(load.max_tokens_factor * num_output)),
                timeout_s=load.timeout_s,
            )
        start = end


def _length(rng: np.random.Generator, mean: float, sigma: float) -> int:
    return int(np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma), 1, 8 * mean))


class LoadMailbox:
    """A mailbox that sends the calls of a load and records what becomes of them.

    Args:
        until: simulated time at which the load ends.

    Attributes:
        on_done: called at that time.
    """

    def __init__(self, clock: SimulatedClock, load: Load, until: float) -> None:
        self._clock = clock
        self._load = load
        self._until = until
        self._arrivals = make_calls(load)
        self._next = next(self._arrivals, None)
        self._repeats: list[tuple[float, int]] = []  # (time, number of the call)
        self._stops: list[GatewayMessage] = []
        self.calls: list[Call] = []
        self.on_done: Callable[[], None] = lambda: None

    def receive(self, timeout_s: float) -> list[tuple[bytes, GatewayMessage]]:
        if self._clock.now >= self._until:
            self.on_done()
            return []
        if timeout_s > 0:
            self._clock.now = max(self._clock.now, min(self._next_at(), self._until))
        due, self._stops = [(GATEWAY, message) for message in self._stops], []
        while self._next is not None and self._next.arrived_at <= self._clock.now:
            call, self._next = self._next, next(self._arrivals, None)
            self.calls.append(call)
            due.append((GATEWAY, self._submit(call)))
        while self._repeats and self._repeats[0][0] <= self._clock.now:
            _, number = heapq.heappop(self._repeats)
            due.append((GATEWAY, self._submit(self.calls[number])))
        return due

    def _next_at(self) -> float:
        arrival = self._until if self._next is None else self._next.arrived_at
        return min(arrival, self._repeats[0][0]) if self._repeats else arrival

    def _submit(self, call: Call) -> Submit:
        call.ended_at, call.error = None, ""  # of an earlier refusal, after which the caller has come back
        rng = np.random.default_rng(call.number)
        timeout_s = None
        if call.timeout_s is not None:
            timeout_s = call.arrived_at + call.timeout_s - self._clock.now
        return Submit(
            handle=call.number,
            request_id=f"call-{call.number}",
            prompt_token_ids=rng.integers(FIRST_TOKEN, VOCAB_SIZE, call.num_prompt_tokens).astype(np.int32),
            sampling=SamplingParams(
                max_tokens=call.max_tokens,
                seed=call.number,
                stop=("end",) if self._load.max_tokens_factor > 1.0 else (),
            ),
            tenant=call.tenant,
            timeout_s=timeout_s,
        )

    def send(self, gateway: bytes, message: ReplicaMessage) -> bool:
        assert isinstance(message, TokenBatch)
        for handle in message.handles.tolist():
            call = self.calls[handle]
            call.num_received += 1
            if call.num_received == call.num_output_tokens:
                call.done_at = self._clock.now
                if call.max_tokens > call.num_output_tokens:
                    self._stops.append(Stop(handle))
        for finish in message.finished:
            self._on_finish(self.calls[finish.handle], finish)
        return True

    def _on_finish(self, call: Call, finish: Finish) -> None:
        call.ended_at = self._clock.now
        if finish.reason is FinishReason.ERROR:
            call.error = finish.grpc_status
        if call.error == OVERLOADED and self._load.retries:
            again_at = self._clock.now + (1.0 if finish.retry_after_s is None else finish.retry_after_s)
            if call.timeout_s is None or again_at < call.arrived_at + call.timeout_s:
                heapq.heappush(self._repeats, (again_at, call.number))

    def wake(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a load.

    Attributes:
        num_computed_tokens: tokens of all steps.
    """

    calls: list[Call]
    num_computed_tokens: int
    num_preemptions: int

    def between(self, start: float, end: float) -> list[Call]:
        """Return the calls that arrived in a time."""
        return [call for call in self.calls if start <= call.arrived_at < end]

    def goodput(self, start: float, end: float) -> float:
        """Return the output tokens per second of calls that ended in a time, whole and within their deadline."""
        good = (call for call in self.calls if call.is_good and start <= (call.done_at or 0.0) < end)
        return sum(call.num_output_tokens for call in good) / (end - start)

    def num_wasted_tokens(self, start: float, end: float) -> int:
        """Return the output tokens that came for calls that arrived in a time and were not served in time."""
        return sum(call.num_received for call in self.between(start, end) if call.error or not call.is_good)


def serve(load: Load, model: ReplicaModel | None = None) -> Outcome:
    """Serve a load until its last phase ends."""
    model = model or ReplicaModel()
    scheduler, clock = Scheduler(model.config()), SimulatedClock()
    group = SimulatedRanks(model.max_num_seqs, clock, model.step_time)
    mailbox = LoadMailbox(clock, load, sum(phase.seconds for phase in load.phases))
    loop = StepLoop(scheduler, group, mailbox, "replica-0", clock)
    mailbox.on_done = loop.stop
    loop.run()
    return Outcome(mailbox.calls, scheduler.throughput.num_computed_tokens, scheduler.stats.num_preemptions)
