"""RankedDriver: the scheduler with the real ranks of tests/worker, step by step in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from driver import Driver
from reference import Reference

from quire.proto.config import EngineConfig
from quire.proto.step import EncoderInput, Logprobs, StepPlan, StepResult
from quire.proto.stream import TokenBatch


class _Ranks:
    """A worker group that executes a plan when its result is gathered, in no time."""

    def __init__(
        self, step: Callable[[StepPlan], StepResult], take_media: Callable[[EncoderInput], None] | None = None
    ) -> None:
        self._step, self._take_media = step, take_media
        self._plans: deque[StepPlan] = deque()

    def broadcast(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def send_media(self, image: EncoderInput) -> None:
        assert self._take_media is not None, "images are for an engine that is asked to take them"
        self._take_media(EncoderInput.decode(image.encode()))

    def gather(self, timeout_s: float) -> StepResult:
        return replace(self._step(self._plans.popleft()), stage_times={})


class RankedDriver(Driver):
    """A Driver whose steps an Engine of tests/worker executes.

    Its tests are of the ranks: the scheduler is checked less often, which took 11 % of their time.

    Attributes:
        logprobs: handle |-> log-probabilities of its tokens, as lists of (chosen, rank, top ids, top).
    """

    steps_per_check = 16

    def __init__(
        self,
        config: EngineConfig,
        step: Callable[[StepPlan], StepResult],
        take_media: Callable[[EncoderInput], None] | None = None,
    ) -> None:
        super().__init__(config)
        self.group = _Ranks(step, take_media)  # type: ignore[assignment]
        self.logprobs: dict[int, list[Any]] = {}

    @staticmethod
    def of(engine: Any, num_blocks: int, num_host_blocks: int = 0) -> RankedDriver:
        """Return a driver of an Engine of tests/worker, with as many blocks."""
        config = engine.config.with_num_blocks(num_blocks)
        cache = replace(config.cache, num_host_kv_blocks=num_host_blocks)
        return RankedDriver(replace(config, cache=cache), engine.step)

    def add_all(self, prompts: dict[int, list[int]], num_tokens: int) -> None:
        """Add the prompts, by handle; those that have tokens already continue from them."""
        for handle, prompt in prompts.items():
            generated = self.outputs.get(handle, [])
            self.add(handle, prompt, max_tokens=num_tokens, ignore_eos=True, generated=generated)

    def empty_ranks(self) -> None:
        """Release the rows of ended sequences and the images on the ranks, for another driver."""
        released, _, _ = self.scheduler._state.deltas.take()
        outputs = np.array([*self.scheduler.media.cache._outputs], np.int32)
        self.group.broadcast(StepPlan(0, 1, 0, released_rows=released, media_drops=outputs))
        self.group.gather(1.0)

    def finish(self, prompts: dict[int, list[int]], reference: Reference, num_tokens: int) -> None:
        """Run to the end; compare the greedy outputs, of `num_tokens` each, to the prompts, by handle."""
        self.run(depth=2)
        self.empty_ranks()
        assert self.scheduler.blocks.num_held_blocks == 0
        for handle, prompt in prompts.items():
            assert len(self.outputs[handle]) == num_tokens
            reference.check_greedy(prompt, self.outputs[handle])

    def record(self, outgoing: list[tuple[bytes, TokenBatch]]) -> None:
        super().record(outgoing)
        for _, batch in outgoing:
            if batch.logprobs is not None:
                self._record_logprobs(batch.handles, batch.logprobs)

    def _record_logprobs(self, handles: np.ndarray, logprobs: Logprobs) -> None:
        columns = (logprobs.index, logprobs.chosen, logprobs.ranks, logprobs.top_ids, logprobs.top)
        for index, *entry in zip(*(column.tolist() for column in columns), strict=True):
            self.logprobs.setdefault(int(handles[index]), []).append(entry)
