"""A real model's answers go on at another replica token for token, wherever they are cut."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quire.cluster.config.resolve import resolve
from quire.cluster.offline.in_process import InProcessEngine
from quire.cluster.requests.request import Request
from quire.proto.config import EngineConfig
from quire.proto.sampling import SamplingParams
from quire.proto.stream import FinishReason

PROMPT = np.arange(30, 53, dtype=np.int32)
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.3, top_p=0.95, seed=11, max_tokens=24, min_tokens=20),
    "penalised": SamplingParams(
        temperature=1.0, seed=5, max_tokens=24, ignore_eos=True,
        repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=0.4,
    ),
    "forked": SamplingParams(temperature=1.0, seed=-3, max_tokens=18, ignore_eos=True, n=3),
}  # fmt: skip


@pytest.fixture(scope="module")
def config(make_model: Callable[..., Path]) -> EngineConfig:
    folder = str(make_model("llama"))
    return resolve(folder, device="cpu", dtype="float32", num_kv_blocks=64, max_num_batched_tokens=16)


def test_requests_that_move_are_answered_as_if_they_had_stayed(config: EngineConfig) -> None:
    stayed = run(config, moves=())
    assert len(set(map(tuple, stayed.values()))) == len(stayed) == 6
    for moves in [(3,), (1, 2, 9)]:
        assert run(config, moves) == stayed


def run(config: EngineConfig, moves: tuple[int, ...]) -> dict[int, list[int]]:
    """All answers, by handle, after that many steps each moved to a replica that knows nothing of what was before."""
    engine, requests = InProcessEngine(config), dict[int, tuple[Request, int]]()
    for settings in SETTINGS.values():
        first, request = len(requests), Request("moving", PROMPT, settings)
        engine.submit(first, request)
        requests |= {first + index: (request, index) for index in range(settings.n)}
    answers: dict[int, list[int]] = {handle: [] for handle in requests}
    for num_steps in moves:
        for _ in range(num_steps):
            step(engine, answers)
        moved = drain(engine)
        engine.close()
        engine = InProcessEngine(config)
        for handle, num_tokens in moved.items():
            assert num_tokens == len(answers[handle])
            request, index = requests[handle]
            engine.submit(handle, request.resumed(index, answers[handle]))
    while engine.scheduler.has_work:
        step(engine, answers)
    engine.close()
    return answers


def step(engine: InProcessEngine, answers: dict[int, list[int]]) -> None:
    for handle, news in engine.step():
        answers[handle] += news.token_ids


def drain(engine: InProcessEngine) -> dict[int, int]:
    """Has everything given back: handle |-> how many tokens it had."""
    now = time.monotonic()
    engine.scheduler.drain(grace_s=0.0, now=now)
    assert engine.scheduler.schedule(now) is None
    ends = [finish for _, batch in engine.scheduler.take_news() for finish in batch.finished]
    assert all(finish.reason is FinishReason.MOVED for finish in ends)
    assert not engine.scheduler.has_work
    return {finish.handle: finish.num_completion_tokens for finish in ends}
