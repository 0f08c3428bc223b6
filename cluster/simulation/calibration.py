"""Calibration: steps of an engine in this process or of a server, measured for the fit of a StepTime."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

import numpy as np

from ...proto.config import EngineConfig
from ...proto.errors import ConfigError
from ...proto.sampling import SamplingParams
from ...proto.stream import GatewayMessage, ReplicaMessage, Submit, TokenBatch
from ...scheduler import (
    MeasuredStep,
    MeteredRanks,
    Scheduler,
    StepLoop,
    StepWork,
    WorkerGroup,
    read_steps,
)
from .replica import GATEWAY

# Ids below are special or bytes in many tokenizers.
_FIRST_TOKEN = 300
# Steps of a new process are slow: memory is touched for the first time, and kernels are compiled.
_NUM_COLD_STEPS = 32
# Sequences of the mixture that begin among as many others.
_CONSTANT_LOAD = 20


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


def mixture(config: EngineConfig, num_sequences: int = 160) -> Iterator[tuple[int, Probe]]:
    """Yield single sequences of many lengths, each with the number of sequences among which it begins to run.

    Probes repeat equal steps, which find their memory in the cache and their rows unchanged. Traffic does not.
    """
    rng = np.random.default_rng(1)
    assert config.cache.num_kv_blocks is not None
    most = config.scheduler.max_num_seqs
    longest = min(
        config.max_servable_tokens // 2, (config.cache.num_kv_blocks - 1) * config.cache.block_size // most
    )
    wanted = 1
    for number in range(num_sequences):
        if number % _CONSTANT_LOAD == 0:
            wanted = int(rng.integers(1, most + 1))
        num_prompt, num_output = (
            np.exp(rng.uniform(np.log(8), np.log((max(9, longest), 64)))).astype(int).tolist()
        )
        yield wanted, Probe(1, num_prompt, num_output)


class _Prober:
    """The mailbox of a step loop that runs one probe after another.

    Attributes:
        num_running: sequences that have not ended.
    """

    def __init__(self, vocab_size: int) -> None:
        self._rng = np.random.default_rng(0)
        self._vocab_size = vocab_size
        self._inbox: deque[tuple[bytes, GatewayMessage]] = deque()
        self._handles = count()
        self.num_running = 0

    def submit(self, probe: Probe) -> None:
        low = min(_FIRST_TOKEN, self._vocab_size // 2)
        for handle in islice(self._handles, probe.num_sequences):
            prompt = self._rng.integers(low, self._vocab_size, probe.num_prompt_tokens).astype(np.int32)
            sampling = SamplingParams(
                max_tokens=probe.num_output_tokens, temperature=0.0, seed=0, ignore_eos=True
            )
            self._inbox.append((GATEWAY, Submit(handle, f"probe-{handle}", prompt, sampling=sampling)))
        self.num_running += probe.num_sequences

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
    """Run probes and a mixture of sequences on an engine's ranks, with the scheduler that serves; return the steps.

    The first steps are left out.
    """
    # With one step in flight, nothing hides the scheduler's time when the engine serves either.
    is_serial = config.scheduler.max_steps_in_flight == 1
    # One step at a time: of two in flight, a CPU computes the second before the first one's result is read.
    config = replace(config, scheduler=replace(config.scheduler, max_steps_in_flight=1))
    steps: list[MeasuredStep] = []

    def on_step(work: StepWork, seconds: float) -> None:
        steps.append(MeasuredStep(work, seconds))

    prober = _Prober(config.model.vocab_size)
    metered = MeteredRanks(ranks, config.scheduler.max_num_seqs, clock, on_step, is_serial=is_serial)
    loop = StepLoop(Scheduler(config), metered, prober, "calibration", time.monotonic)

    def run_until(num_running: int) -> None:
        while prober.num_running > num_running:
            loop.turn()

    for _ in range(repeats):
        for probe in probes(config):
            on_probe(probe)
            metered.rest()
            prober.submit(probe)
            run_until(0)
        metered.rest()
        for num_running, probe in mixture(config):
            run_until(num_running - 1)
            on_probe(probe)
            prober.submit(probe)
        run_until(0)
    return [step for step in steps[_NUM_COLD_STEPS:] if step.work.num_tokens]


def read_recorded_steps(paths: Sequence[Path], config: EngineConfig) -> list[MeasuredStep]:
    """Return the steps that replicas of this configuration recorded, without the first ones of each.

    Raises:
        ConfigError: a file cannot be read, or its replica computed with another type or on other ranks.
    """
    found: list[MeasuredStep] = []
    for path in paths:
        facts, steps = read_steps(path)
        expected = {
            "dtype": config.model.dtype,
            "tensor_parallel_size": config.parallel.tensor_parallel_size,
        }
        for name, value in expected.items():
            if facts.get(name) != value:
                raise ConfigError(f"steps {path} are of {name} {facts.get(name)}, not of {value}")
        found += steps[_NUM_COLD_STEPS:]
    return found
