"""Replay of traces through the real control plane, in simulated time.

Scheduler and StepLoop are the real ones. Their environment is simulated: a worker group without a model returns
random tokens after the time given by a roofline, a mailbox delivers requests at the times of the trace, and only
these two advance the clock. A replay of an hour takes seconds and is deterministic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.trace import FIRST_TOKEN, VOCAB_SIZE, Trace, TracedRequest
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.resolve import engine_config
from quire.proto.block_tables import IntArray
from quire.proto.config import EngineConfig, ModelConfig
from quire.proto.replica_status import RankStatus
from quire.proto.sampling import MAX_OUTPUTS, SamplingParams
from quire.proto.step import StepPlan, StepResult
from quire.proto.stream import Finish, FinishReason, GatewayMessage, ReplicaMessage, Submit, TokenBatch
from quire.scheduler.core.scheduler import Scheduler
from quire.scheduler.service.loop import StepLoop
from quire.scheduler.service.worker_group import Rebuilt

GATEWAY = b"trace"


@dataclass(frozen=True, slots=True)
class Roofline:
    """Lower bound of a step's time (Williams et al., 2009): its arithmetic or its memory traffic.

    The defaults are a Llama of 8 billion parameters in bfloat16 on one NVIDIA H100, at 60 % of its arithmetic.
    """

    flops_per_token: float = 16e9
    flops_per_s: float = 600e12
    weight_bytes: float = 16e9
    kv_bytes_per_token: float = 131_072
    bytes_per_s: float = 3.35e12

    def step_s(self, num_tokens: int, num_read_tokens: int) -> float:
        """Return the seconds of a step that computes `num_tokens` and reads the KV of `num_read_tokens`."""
        traffic = self.weight_bytes + self.kv_bytes_per_token * num_read_tokens
        return max(num_tokens * self.flops_per_token / self.flops_per_s, traffic / self.bytes_per_s)

    def busy_s(self, trace: Trace) -> float:
        """Return the seconds that a trace's prompts and KV reads take with perfect batching."""
        num_prompt = sum(request.num_prompt_tokens for request in trace.requests)
        num_read = sum(
            request.num_output_tokens * (request.num_prompt_tokens + request.num_output_tokens / 2)
            for request in trace.requests
        )
        return (
            num_prompt * self.flops_per_token / self.flops_per_s
            + num_read * self.kv_bytes_per_token / self.bytes_per_s
        )


class SimulatedClock:
    """Simulated seconds since the start of the trace."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SimulatedGroup:
    """A worker group without a model: it simulates the rows, lengths and duration of plans.

    Args:
        on_elapsed: called with the seconds before each result, during which the state is that of the plans so far.
    """

    def __init__(
        self,
        num_rows: int,
        clock: SimulatedClock,
        on_elapsed: Callable[[float], None] = lambda seconds: None,
        roofline: Roofline | None = None,
    ) -> None:
        self._clock = clock
        self._on_elapsed = on_elapsed
        self._roofline = roofline or Roofline()
        self._rng = np.random.default_rng(0)
        self._busy_until = 0.0
        self._results: deque[tuple[float, StepResult]] = deque()
        self._decoding = np.zeros(num_rows, np.bool_)
        self._num_known = np.zeros(num_rows, np.int64)  # at the start of the row's sequence
        self._num_computed = np.zeros(num_rows, np.int64)

    def broadcast(self, plan: StepPlan) -> None:
        rows, num_tokens, num_read_tokens = self._execute(plan)
        seconds = self._roofline.step_s(num_tokens, num_read_tokens)
        self._busy_until = max(self._busy_until, self._clock.now) + seconds
        token_ids = self._rng.integers(FIRST_TOKEN, VOCAB_SIZE, rows.size).astype(np.int32)
        result = StepResult(plan.step_id, plan.epoch, 0, token_ids, None, {"forward": seconds})
        self._results.append((self._busy_until, result))

    def gather(self, timeout_s: float) -> StepResult:
        done_at, result = self._results.popleft()
        self._on_elapsed(done_at - self._clock.now)
        self._clock.now = done_at
        return result

    def check(self) -> None: ...

    def examine(self, waited_s: float, *, failed_s: float) -> None: ...

    def rebuild(self, epoch: int) -> Rebuilt:
        raise AssertionError("ranks that cannot fail are rebuilt")

    def statuses(self) -> tuple[RankStatus, ...]:
        return ()

    def close(self) -> None: ...

    def _execute(self, plan: StepPlan) -> tuple[IntArray, int, int]:
        """Return the rows that sample, the number of tokens computed, and the number of tokens whose KV is read."""
        self._decoding[plan.released_rows] = False
        for new in plan.new:
            self._num_known[new.row] = new.token_ids.size
            self._num_computed[new.row] = new.num_computed_tokens
        active = self._decoding.copy()
        active[plan.held_rows] = False
        num_tokens = int(active.sum() + plan.chunk_lens.sum())
        self._num_computed[active] += 1
        self._num_computed[plan.chunk_rows] += plan.chunk_lens
        num_read_tokens = int(self._num_computed[active].sum() + self._num_computed[plan.chunk_rows].sum())
        complete = self._num_computed[plan.chunk_rows] == self._num_known[plan.chunk_rows]
        active[plan.chunk_rows[complete]] = True
        self._decoding |= active
        return np.flatnonzero(active).astype(np.int32), num_tokens, num_read_tokens


class TraceMailbox:
    """A mailbox that delivers requests at the times of a trace and records their ends.

    Attributes:
        finishes: all Finish messages, in order.
        on_done: called when all requests have ended.
    """

    def __init__(self, clock: SimulatedClock, requests: list[TracedRequest]) -> None:
        self._clock = clock
        self._pending = deque(requests)
        self._num_left = len(requests)
        self.finishes: list[Finish] = []
        self.on_done: Callable[[], None] = lambda: None

    def receive(self, timeout_s: float) -> list[tuple[bytes, GatewayMessage]]:
        if not self._num_left:
            self.on_done()
            return []
        if timeout_s > 0:
            assert self._pending, f"{self._num_left} outputs are left that the scheduler does not schedule"
            self._clock.now = max(self._clock.now, self._pending[0].arrival_s)
        due: list[tuple[bytes, GatewayMessage]] = []
        while self._pending and self._pending[0].arrival_s <= self._clock.now:
            due.append((GATEWAY, self._submit(self._pending.popleft())))
        return due

    def _submit(self, request: TracedRequest) -> Submit:
        most = request.num_output_tokens
        return Submit(
            handle=request.number * MAX_OUTPUTS,
            request_id=f"request-{request.number}",
            prompt_token_ids=request.prompt(),
            sampling=SamplingParams(max_tokens=most, seed=request.number, ignore_eos=True),
        )

    def send(self, gateway: bytes, message: ReplicaMessage) -> bool:
        assert isinstance(message, TokenBatch)
        for finish in message.finished:
            assert finish.reason is FinishReason.LENGTH, f"a request failed: {finish.error}"
            self.finishes.append(finish)
        self._num_left -= len(message.finished)
        return True

    def wake(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Replay:
    """The outcome of a replay.

    Attributes:
        seconds: in which steps were computed.
        mean_running: running sequences, averaged over these.
        num_left_out: requests that were not sent because the pool cannot hold them.
        num_steps, num_preemptions: counts of the whole replay.
    """

    finishes: list[Finish]
    seconds: float
    mean_running: float
    num_left_out: int
    num_steps: int
    num_preemptions: int

    @property
    def hit_rate(self) -> float:
        """Return the share of the prompts' tokens that were cached when their sequence first ran."""
        num_prompt_tokens = sum(finish.num_prompt_tokens for finish in self.finishes)
        return sum(finish.num_cached_tokens for finish in self.finishes) / num_prompt_tokens


def replay(trace: Trace, num_blocks: int, num_rows: int = 256) -> Replay:
    """Serve all requests of a trace, with outputs of the lengths in the trace.

    Args:
        num_blocks: size of the pool, of 16 tokens each, without the scratch block.
        num_rows: most sequences that run at once.
    """
    config = make_config(num_blocks, 16, num_rows, trace.max_tokens)
    fitting = [request for request in trace.requests if request.num_tokens <= config.max_servable_tokens]
    scheduler, clock = Scheduler(config), SimulatedClock()
    elapsed: list[tuple[float, int]] = []  # seconds, and the sequences that ran during these
    group = SimulatedGroup(num_rows, clock, lambda seconds: elapsed.append((seconds, scheduler.num_running)))
    mailbox = TraceMailbox(clock, fitting)
    loop = StepLoop(scheduler, group, mailbox, "replay", clock)
    mailbox.on_done = loop.stop
    loop.run()
    seconds = sum(each for each, _ in elapsed)
    mean_running = sum(each * count for each, count in elapsed) / seconds
    stats, num_left_out = scheduler.stats, len(trace.requests) - len(fitting)
    return Replay(
        mailbox.finishes, seconds, mean_running, num_left_out, stats.num_steps, stats.num_preemptions
    )


def make_config(num_blocks: int, block_size: int, num_rows: int, max_tokens: int) -> EngineConfig:
    """Return the configuration of a replica with a context of `max_tokens` and no real model."""
    model = ModelConfig(
        path="", name="none", architecture="", hf={}, dtype="bfloat16", max_model_len=max_tokens,
        vocab_size=VOCAB_SIZE, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1,
    )  # fmt: skip
    options = EngineOptions(
        "none",
        block_size=block_size,
        num_kv_blocks=num_blocks + 1,
        max_num_seqs=num_rows,
        max_queue_len=1_000_000,
    )
    return engine_config(options, model)
