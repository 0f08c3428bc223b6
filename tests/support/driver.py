"""Driver: runs a scheduler with the fake worker group as a step loop does, and records its messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from fakes import FakeFiles, FakeWorkerGroup, submit

from quire.proto.config import EngineConfig
from quire.proto.errors import QuireError, RankFailed
from quire.proto.media import MediaTensors
from quire.proto.step import StepPlan
from quire.proto.stream import Finish, FinishReason, Lent, TokenBatch, media_uploads
from quire.scheduler.core.scheduler import Scheduler
from quire.scheduler.kv.kv_tiers import KvTiers

GATEWAY = b"gateway"


@dataclass
class Driver:
    """One replica without threads or sockets.

    Attributes:
        outputs: handle |-> tokens received so far.
        finishes: handle |-> its Finish.
        scores: handle |-> (position, log-probability) of its prompt's tokens, in the order received.
        vectors: handle |-> vector of a pooled sequence.
        moved: handle |-> Finish of a sequence that was handed off and not submitted again.
        lent: blocks of prompts of which the rest was not computed, as gateways hear of them.
        plans: all plans that were broadcast.
        images: digest |-> tensors, which the gateway sends when it is asked for them.
        asked: digests that were asked for, in order.
        sends_images: otherwise the asks wait in `unanswered`.
    """

    config: EngineConfig
    now: float = 0.0
    outputs: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, Finish] = field(default_factory=dict)
    moved: dict[int, Finish] = field(default_factory=dict)
    scores: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    vectors: dict[int, list[float]] = field(default_factory=dict)
    lent: list[Lent] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    images: dict[bytes, MediaTensors] = field(default_factory=dict)
    asked: list[bytes] = field(default_factory=list)
    unanswered: list[bytes] = field(default_factory=list)
    sends_images: bool = True
    # Steps of which the last one is followed by a check of the scheduler's integrity.
    steps_per_check: ClassVar[int] = 1

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config)
        self.files = FakeFiles()
        self.group = FakeWorkerGroup(self.config, self.files)

    def add(self, handle: int, prompt: list[int], gateway: bytes = GATEWAY, **settings: Any) -> Finish | None:
        request = submit(handle, prompt, **settings)
        for index in range(request.sampling.num_sequences):
            self.outputs.setdefault(handle + index, [])
            self.moved.pop(handle + index, None)
        rejection = self.scheduler.add(gateway, request, self.now)
        if rejection is not None:
            self.finishes[handle] = rejection
        self.answer_asks()
        return rejection

    def answer_asks(self) -> None:
        """Send the images that were asked for, if the gateway does."""
        for _, wanted in self.scheduler.media.take_asks():
            self.asked += wanted.digests
            self.unanswered += wanted.digests
        while self.sends_images and self.unanswered:
            digest = self.unanswered.pop(0)
            for upload in media_uploads(digest, self.images[digest]):
                self.scheduler.receive_media(upload, self.now)

    def abort(self, handle: int, gateway: bytes = GATEWAY) -> bool:
        return self.scheduler.abort(gateway, handle, self.now)

    def fail(self, error: QuireError) -> None:
        """Lose the worker group and continue with a new scheduler and group."""
        self.record(self.scheduler.fail_all(error))
        self.scheduler.check_integrity()
        self.replace()

    def lose_ranks(
        self, *, is_step_error: bool = False, step_id: int | None = None, kept: KvTiers = KvTiers.NONE
    ) -> None:
        """Lose the ranks with their KV, except what is kept, and continue with new ones."""
        failure = RankFailed(0, "killed", step_id, is_step_error=is_step_error)
        self.scheduler.interrupt(failure, self.now)
        self.record(self.scheduler.take_outgoing())
        self.scheduler.check_integrity()
        self.group.kept, self.group.has_new_ranks = kept, KvTiers.DEVICE not in kept
        self.resume()
        self.scheduler.check_integrity()

    def resume(self) -> None:
        """Rebuild the ranks after `Scheduler.interrupt`."""
        epoch = self.scheduler.epoch + 1
        rebuilt = self.group.rebuild(epoch)
        self.scheduler.resume(epoch, rebuilt.kept, has_new_ranks=rebuilt.has_new_ranks)

    def replace(self) -> None:
        """Continue with a new replica in place of this one, which must have no work left."""
        self.record(self.scheduler.take_outgoing())
        assert not self.scheduler.has_work
        assert self.scheduler.blocks.num_held_blocks == 0
        self.scheduler = Scheduler(self.config)
        self.group = FakeWorkerGroup(self.config, self.files)

    def plan(self) -> StepPlan | None:
        """Plan and broadcast one step, if there is work."""
        self.answer_asks()
        plan = self.scheduler.schedule(self.now)
        self.record(self.scheduler.take_outgoing())
        self._check_after_step()
        if plan is not None:
            self.plans.append(plan)
            self._check_size(plan.step_id)
            for image in self.scheduler.media.take_inputs():
                self.group.send_media(image)
            self.group.broadcast(plan)
        return plan

    def _check_size(self, step_id: int) -> None:
        """Check that a step is no larger than those by which ranks size their memory."""
        step = self.scheduler._state.in_flight.find(step_id)
        assert step is not None
        num_tokens = step.num_tokens + (0 if step.draft_lens is None else int(step.draft_lens.sum()))
        scheduler = self.config.scheduler
        most = scheduler.max_num_batched_tokens if step.num_prompt_tokens else self.config.max_decode_tokens
        assert num_tokens <= most

    def apply_result(self) -> None:
        """Execute the oldest step in flight and apply its result."""
        self.record(self.scheduler.apply(self.group.gather(1.0), self.now))
        self._check_after_step()

    def _check_after_step(self) -> None:
        if len(self.plans) % self.steps_per_check == 0:
            self.scheduler.check_integrity()

    def record(self, outgoing: list[tuple[bytes, TokenBatch]]) -> None:
        for _, batch in outgoing:
            if (scores := batch.prompt_logprobs) is not None:
                entries = zip(scores.logprobs.index.tolist(), scores.logprobs.chosen.tolist(), strict=True)
                for handle, entry in zip(scores.owners.tolist(), entries, strict=True):
                    assert handle not in self.finishes, f"a score of {handle} came after its end"
                    self.scores.setdefault(handle, []).append(entry)
            for handle, token_id in zip(batch.handles.tolist(), batch.token_ids.tolist(), strict=True):
                assert handle not in {**self.finishes, **self.moved}, (
                    f"a token of {handle} came after its end"
                )
                self.outputs[handle].append(token_id)
            for handle, vector in batch.pooled or ():
                assert handle not in self.vectors, f"{handle} has two vectors"
                assert handle in {finish.handle for finish in batch.finished}
                self.vectors[handle] = vector.tolist()
            self.lent += batch.lent
            for finish in batch.finished:
                assert finish.handle not in {**self.finishes, **self.moved}, f"{finish.handle} ended twice"
                ends = self.moved if finish.reason is FinishReason.MOVED else self.finishes
                ends[finish.handle] = finish

    def step(self, depth: int = 1) -> bool:
        """Do one step as StepLoop.step does; return False if there was no work."""
        while self.scheduler.num_in_flight < depth and self.plan() is not None:
            pass
        if not self.scheduler.num_in_flight:
            self.answer_asks()
            if self.scheduler.num_in_flight or self.plan() is None:
                return False
        self.apply_result()
        return True

    def run(self, depth: int = 1, most_steps: int = 50_000) -> None:
        """Step until no work is left."""
        for _ in range(most_steps):
            if not self.step(depth):
                assert not self.scheduler.has_work, "the scheduler has work that it does not schedule"
                self.scheduler.check_integrity()
                return
        raise AssertionError(f"not done after {most_steps} steps")
