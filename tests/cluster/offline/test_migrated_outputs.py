"""Requests that migrate between replicas of a real model get the same tokens as requests that stay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.offline.in_process import load_in_process
from quire.cluster.text.requests.grammar_compiler import LocalGrammarCompiler
from quire.cluster.text.requests.request import Request
from quire.cluster.text.requests.sequence_update import updates_by_handle
from quire.proto.config import EngineConfig
from quire.proto.sampling import SamplingParams
from quire.proto.stream import Drain, FinishReason, GatewayMessage, ReplicaMessage, TokenBatch
from quire.proto.structured_outputs import (
    OutputConstraint,
    RepetitionDetectionParams,
    StructuredOutputsParams,
)
from quire.scheduler.core.scheduler import Scheduler
from quire.scheduler.service.loop import StepLoop
from quire.scheduler.service.mailbox import InMemoryMailbox

GATEWAY = b"gateway"
PROMPT = np.arange(30, 53, dtype=np.int32)
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.3, top_p=0.95, seed=11, max_tokens=24, min_tokens=20),
    "penalized": SamplingParams(
        temperature=1.0, seed=5, max_tokens=24, ignore_eos=True,
        repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=0.4,
    ),
    "forked": SamplingParams(temperature=1.0, seed=-3, max_tokens=18, ignore_eos=True, n=3),
    "constrained": SamplingParams(temperature=1.0, seed=2, max_tokens=24),
    "repeating": SamplingParams(max_tokens=24, repetition_detection=RepetitionDetectionParams(4, 0, 4)),
}  # fmt: skip
# Name of the setting |-> the form of its outputs.
FORMS = {
    "constrained": StructuredOutputsParams(regex="([a-z]{2}[0-9]){8,}"),
    "repeating": StructuredOutputsParams(regex="(ab){40}"),
}


@pytest.fixture(scope="module")
def config(make_model: Callable[..., Path]) -> EngineConfig:
    folder = str(make_model("llama"))
    options = EngineOptions(
        folder, device="cpu", dtype="float32", num_kv_blocks=64, max_num_batched_tokens=16
    )
    return resolve(options, Machine.this())


class SteppedReplica:
    """A replica whose step loop the test drives by hand.

    Attributes:
        outputs: handle |-> tokens received so far.
        moved: handle |-> tokens that the sequence had when it was handed off.
    """

    def __init__(self, config: EngineConfig, outputs: dict[int, list[int]]) -> None:
        config, self._group = load_in_process(config)
        self._mailbox = InMemoryMailbox()
        self._mailbox.connect(GATEWAY, self._on_message)
        self.scheduler = Scheduler(config)
        self._loop = StepLoop(self.scheduler, self._group, self._mailbox, "replica-0")
        self.outputs = outputs
        self.moved: dict[int, int] = {}

    def post(self, message: GatewayMessage) -> None:
        self._mailbox.post(GATEWAY, message)
        self._loop.handle_messages(0.0)

    def step(self) -> bool:
        return self._loop.step()

    def close(self) -> None:
        self._group.close()

    def _on_message(self, message: ReplicaMessage) -> None:
        assert isinstance(message, TokenBatch)
        for handle, update in updates_by_handle(message):
            self.outputs[handle] += update.token_ids
            if update.finish is not None and update.finish.reason is FinishReason.MOVED:
                self.moved[handle] = update.finish.num_completion_tokens


def test_migrated_requests_get_the_same_tokens(config: EngineConfig) -> None:
    stayed = run(config, moves=())
    assert len(set(map(tuple, stayed.values()))) == len(stayed) == 8
    assert 4 < len(stayed[7]) < 24  # the detector counts tokens of the replica before
    for moves in [(3,), (1, 2, 9)]:
        assert run(config, moves) == stayed


def constraint(config: EngineConfig, name: str) -> OutputConstraint | None:
    if name not in FORMS:
        return None
    return OutputConstraint(len(PROMPT), LocalGrammarCompiler(config).compile(FORMS[name]))


def run(config: EngineConfig, moves: tuple[int, ...]) -> dict[int, list[int]]:
    """All outputs by handle; after each of so many steps every sequence moves to a fresh replica."""
    requests: dict[int, tuple[Request, int]] = {}
    outputs: dict[int, list[int]] = defaultdict(list)
    replica = SteppedReplica(config, outputs)
    for name, settings in SETTINGS.items():
        first, request = (
            len(requests),
            Request("moving", PROMPT, settings, constraint=constraint(config, name)),
        )
        replica.post(request.submit_message(first))
        requests |= {first + index: (request, index) for index in range(settings.n)}
    for num_steps in moves:
        for _ in range(num_steps):
            assert replica.step()
        replica.post(Drain(0.0))
        while replica.step():
            pass
        assert not replica.scheduler.has_work
        replica.close()
        moved, replica = replica.moved, SteppedReplica(config, outputs)
        for handle, num_tokens in moved.items():
            assert num_tokens == len(outputs[handle])
            request, index = requests[handle]
            replica.post(request.resumed(index, outputs[handle]).submit_message(handle))
    while replica.step():
        pass
    assert not replica.scheduler.has_work
    replica.close()
    return dict(outputs)
