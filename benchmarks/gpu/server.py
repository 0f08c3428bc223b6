"""Server: the scheduler, step loop and one rank that `quire serve` runs, stepped by hand and timed step by step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.offline.in_process import load_in_process
from quire.cluster.text.requests.sequence_update import updates_by_handle
from quire.proto.config import EngineConfig
from quire.proto.lora import LoraReference
from quire.proto.pooling import PoolingParams
from quire.proto.sampling import SamplingParams
from quire.proto.stream import Abort, FinishReason, ReplicaMessage, Submit, TokenBatch
from quire.scheduler.core.scheduler import Scheduler
from quire.scheduler.service.loop import StepLoop
from quire.scheduler.service.mailbox import InMemoryMailbox

_GATEWAY = b"benchmark"
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, ignore_eos=True)


class Server:
    """One engine.

    Args:
        compiles_ahead: on a GPU, compile kernels beside the reading of weights, which costs some seconds where they
            are in Triton's cache.
        start: starts the ranks of a configuration, and returns it with their number of blocks, and the group; None:
            one rank, in this process.
        options: engine options, beside the model.

    Attributes:
        tokens: handle |-> the tokens sampled so far.
        num_vectors: vectors of pooled prompts so far.
        running: handles of requests that have not ended.
        load_s: seconds from the start to ready.
    """

    def __init__(
        self,
        folder: Path,
        *,
        compiles_ahead: bool = False,
        start: Callable[[EngineConfig], tuple[EngineConfig, Any]] | None = None,
        **options: Any,
    ) -> None:
        started = time.perf_counter()
        config = resolve(EngineOptions(str(folder), skip_tokenizer_init=True, **options), Machine.this())
        self.group: Any
        self.config, self.group = (start or partial(load_in_process, compiles_ahead=compiles_ahead))(config)
        self.load_s = time.perf_counter() - started
        self.scheduler = Scheduler(self.config)
        self._mailbox = InMemoryMailbox()
        self._mailbox.connect(_GATEWAY, self._on_message)
        self._loop = StepLoop(self.scheduler, self.group, self._mailbox, "benchmark")
        self._num_submitted = 0
        self.tokens: dict[int, list[int]] = {}
        self.running: set[int] = set()
        self.num_vectors = 0

    def submit(
        self,
        prompt: np.ndarray[Any, Any],
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        lora: LoraReference | None = None,
    ) -> int:
        """Submit a request for tokens; return its handle."""
        return self._submit(prompt, replace(sampling, max_tokens=max_tokens), lora=lora)

    def submit_pooled(self, prompt: np.ndarray[Any, Any]) -> int:
        """Submit a request for the vector of a prompt; return its handle."""
        return self._submit(prompt, replace(GREEDY, max_tokens=1), pooling=PoolingParams())

    def _submit(self, prompt: np.ndarray[Any, Any], sampling: SamplingParams, **settings: Any) -> int:
        handle = self._num_submitted
        self._num_submitted += 1
        self.tokens[handle] = []
        self.running.add(handle)
        ids = prompt.astype(np.int32)
        self._mailbox.post(_GATEWAY, Submit(handle, f"request-{handle}", ids, sampling, **settings))
        self._loop.handle_messages(0.0)
        return handle

    def step(self) -> float:
        """Run one step of the loop; return its seconds."""
        started = time.perf_counter()
        self._loop.step()
        return time.perf_counter() - started

    def turn(self) -> None:
        """Run one step of the loop, or rebuild the ranks after a failure."""
        self._loop.turn()

    def run(self, num_steps: int) -> list[float]:
        """Run steps; return the seconds of each."""
        return [self.step() for _ in range(num_steps)]

    def prefill(self, handles: list[int]) -> float:
        """Step until each of these requests has a token; return the seconds."""
        started = time.perf_counter()
        while not all(self.tokens[handle] or handle not in self.running for handle in handles):
            self._loop.step()
        return time.perf_counter() - started

    def drain(self) -> None:
        """Step until all requests have ended."""
        while self.running:
            self._loop.step()

    def abort(self) -> None:
        """Abort all requests, and end the steps in flight."""
        for handle in self.running:
            self._mailbox.post(_GATEWAY, Abort(handle))
        self.running.clear()
        self._loop.handle_messages(0.0)
        while self._loop.step():
            pass

    def close(self) -> None:
        """Free the model."""
        self.group.close()

    def _on_message(self, message: ReplicaMessage) -> None:
        if not isinstance(message, TokenBatch):
            return  # of a recovery
        self.num_vectors += 0 if message.pooled is None else len(message.pooled.lens)
        for handle, update in updates_by_handle(message):
            self.tokens[handle] += update.token_ids
            if update.finish is not None:
                self.running.discard(handle)
                if update.finish.reason == FinishReason.ERROR:
                    raise RuntimeError(f"request {handle} failed: {update.finish}")
