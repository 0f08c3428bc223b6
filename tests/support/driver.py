"""Drives a scheduler against the fake worker group the way a replica's loop does, and keeps what it said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fakes import FakeWorkerGroup, submit

from quire.proto.config import EngineConfig
from quire.proto.errors import QuireError
from quire.proto.step import StepPlan
from quire.proto.stream import Finish, FinishReason, TokenBatch
from quire.scheduler.core.scheduler import Scheduler

GATEWAY = b"gateway"


@dataclass
class Driver:
    """One replica without threads or sockets.

    Attributes:
        answers: handle |-> tokens told so far.
        finishes: handle |-> account of its end.
        scores: handle |-> (place, log-probability) of its prompt's tokens, as they were told.
        moved: handle |-> account of its being given back; it was not submitted again since.
        plans: every plan that was broadcast.
    """

    config: EngineConfig
    now: float = 0.0
    answers: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, Finish] = field(default_factory=dict)
    moved: dict[int, Finish] = field(default_factory=dict)
    scores: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config)
        self.group = FakeWorkerGroup(self.config)

    def add(self, handle: int, prompt: list[int], gateway: bytes = GATEWAY, **settings: Any) -> Finish | None:
        request = submit(handle, prompt, **settings)
        for index in range(request.sampling.num_sequences):
            self.answers.setdefault(handle + index, [])
            self.moved.pop(handle + index, None)
        refusal = self.scheduler.add(gateway, request, self.now)
        if refusal is not None:
            self.finishes[handle] = refusal
        return refusal

    def abort(self, handle: int, gateway: bytes = GATEWAY) -> bool:
        return self.scheduler.abort(gateway, handle)

    def fail(self, error: QuireError) -> None:
        """The worker group is lost, and another takes its place."""
        self._hear(self.scheduler.fail_all(error))
        self.scheduler.check_integrity()
        self.replace()

    def replace(self) -> None:
        """Another replica takes the place of this one, which has nothing left to do."""
        self._hear(self.scheduler.take_outgoing())
        assert not self.scheduler.has_work
        assert self.scheduler.blocks.num_held_blocks == 0
        self.scheduler = Scheduler(self.config)
        self.group = FakeWorkerGroup(self.config)

    def plan(self) -> StepPlan | None:
        """Plans and broadcasts one step, if there is anything to do."""
        plan = self.scheduler.schedule(self.now)
        self._hear(self.scheduler.take_outgoing())
        self.scheduler.check_integrity()
        if plan is not None:
            self.plans.append(plan)
            self.group.broadcast(plan)
        return plan

    def take_result(self) -> None:
        """Executes the earliest step in flight and applies its result."""
        self._hear(self.scheduler.apply(self.group.gather(1.0), self.now))
        self.scheduler.check_integrity()

    def _hear(self, news: list[tuple[bytes, TokenBatch]]) -> None:
        for _, batch in news:
            if (told := batch.prompt_logprobs) is not None:
                entries = zip(told.logprobs.index.tolist(), told.logprobs.chosen.tolist(), strict=True)
                for handle, entry in zip(told.owners.tolist(), entries, strict=True):
                    assert handle not in self.finishes, f"a score of {handle} came after its end"
                    self.scores.setdefault(handle, []).append(entry)
            for handle, token_id in zip(batch.handles.tolist(), batch.token_ids.tolist(), strict=True):
                assert handle not in {**self.finishes, **self.moved}, (
                    f"a token of {handle} came after its end"
                )
                self.answers[handle].append(token_id)
            for finish in batch.finished:
                assert finish.handle not in {**self.finishes, **self.moved}, f"{finish.handle} ended twice"
                ends = self.moved if finish.reason is FinishReason.MOVED else self.finishes
                ends[finish.handle] = finish

    def step(self, depth: int = 1) -> bool:
        """As StepLoop.step does."""
        while self.scheduler.num_in_flight < depth and self.plan() is not None:
            pass
        if not self.scheduler.num_in_flight:
            return False
        self.take_result()
        return True

    def run(self, depth: int = 1, most_steps: int = 50_000) -> None:
        """Until nothing is left to do."""
        for _ in range(most_steps):
            if not self.step(depth):
                assert not self.scheduler.has_work, "the scheduler has work that it never schedules"
                return
        raise AssertionError(f"not done after {most_steps} steps")
