"""Calibration: steps of an engine in this process, measured for the fit of a StepTime."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from ...proto.config import EngineConfig
from ...proto.sampling import SamplingParams
from ...proto.stream import GatewayMessage, ReplicaMessage, Submit, TokenBatch
from ...scheduler import Scheduler, StepLoop, WorkerGroup
from .replica import GATEWAY, MeteredRanks
from .step_time import MeasuredStep, StepWork

# Ids below are special or bytes in many tokenizers.
_FIRST_TOKEN = 300
# Steps of a new process are slow: memory is touched for the first time, and kernels are compiled.
_NUM_COLD_STEPS = 32


@dataclass(frozen=True, slots=True)
class Probe:
    """Requests that are sent together.

    Attributes:
        num_sequences: of equal lengths.
    """

    num_sequences: int
    num_prompt_tokens: int
    num_output_tokens: int


def probes(config: EngineConfig, num_output_tokens: int = 12) -> Iterator[Probe]:
    """Yield probes that vary rows, contexts and chunks independently, within the limits of an engine.

    Args:
        num_output_tokens: of each sequence, which is the number of decode steps.
    """
    limits, longest = config.scheduler, config.max_servable_tokens - num_output_tokens
    assert config.cache.num_kv_blocks is not None
    num_tokens = (config.cache.num_kv_blocks - 1) * config.cache.block_size
    rows = 1
    while rows <= limits.max_num_seqs:
        for share in (0.02, 0.15, 0.4, 0.9):
            length = min(
                int(share * longest), num_tokens // rows - num_output_tokens - config.cache.block_size
            )
            if length > 0:
                yield Probe(rows, length, num_output_tokens)
        rows *= 2
    chunk = 8
    while chunk <= min(longest, limits.max_num_batched_tokens):
        yield Probe(1, chunk, 2)
        chunk *= 2


class _Prober:
    """The mailbox of a step loop that runs one probe after another."""

    def __init__(self, vocab_size: int) -> None:
        self._rng = np.random.default_rng(0)
        self._vocab_size = vocab_size
        self._inbox: deque[tuple[bytes, GatewayMessage]] = deque()
        self.num_running = 0

    def submit(self, probe: Probe) -> None:
        low = min(_FIRST_TOKEN, self._vocab_size // 2)
        for handle in range(probe.num_sequences):
            prompt = self._rng.integers(low, self._vocab_size, probe.num_prompt_tokens).astype(np.int32)
            sampling = SamplingParams(
                max_tokens=probe.num_output_tokens, temperature=0.0, seed=0, ignore_eos=True
            )
            self._inbox.append((GATEWAY, Submit(handle, f"probe-{handle}", prompt, sampling=sampling)))
        self.num_running = probe.num_sequences

    def receive(self, timeout_s: float) -> list[tuple[bytes, GatewayMessage]]:
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def send(self, gateway: bytes, message: ReplicaMessage) -> bool:
        if isinstance(message, TokenBatch):
            for finish in message.finished:
                assert not finish.error, f"a probe failed: {finish.error}"
            self.num_running -= len(message.finished)
        return True

    def wake(self) -> None:
        """Nobody waits."""


def measure_steps(
    config: EngineConfig,
    ranks: WorkerGroup,
    repeats: int = 2,
    clock: Callable[[], float] = time.perf_counter,
    on_probe: Callable[[Probe], None] = lambda probe: None,
) -> list[MeasuredStep]:
    """Run probes on an engine's ranks, with the scheduler that serves; return its steps without the first ones.

    Equal steps of the repeats are merged: the fastest counts, since whatever else a machine does only adds time.
    """
    # With one step in flight, nothing hides the scheduler's time when the engine serves either.
    is_serial = config.scheduler.max_steps_in_flight == 1
    # One step at a time: of two in flight, a CPU computes the second before the first one's result is read.
    config = replace(config, scheduler=replace(config.scheduler, max_steps_in_flight=1))
    best: dict[StepWork, float] = {}
    num_steps = 0

    def on_step(work: StepWork, seconds: float) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps > _NUM_COLD_STEPS and work.num_tokens:
            best[work] = min(seconds, best.get(work, seconds))

    prober = _Prober(config.model.vocab_size)
    metered = MeteredRanks(ranks, config.scheduler.max_num_seqs, clock, on_step, is_serial=is_serial)
    loop = StepLoop(Scheduler(config), metered, prober, "calibration", time.monotonic)
    for _ in range(repeats):
        for probe in probes(config):
            on_probe(probe)
            prober.submit(probe)
            metered.rest()
            while prober.num_running:
                loop.turn()
    return [MeasuredStep(work, seconds) for work, seconds in best.items()]
