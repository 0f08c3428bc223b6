"""Prompts whose chunks travel while the rest is computed, between processes of which each side is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import READY_TIMEOUT_S

from benchmarks.replica_processes import (
    ReplicaProcess,
    TwoRoles,
    clients_of,
    make_request,
    replica_processes,
    token_times,
)
from quire.cluster.gateway.routing.request_migration import MigratingRequest, Placement, Stage
from quire.cluster.text.requests.request import Request
from quire.proto.replica_status import ReplicaStatus

PROMPT_LEN, CHUNK_LEN, NUM_TOKENS = 300, 64, 20
DEADLINE_S = READY_TIMEOUT_S
MOST_TRIES = 5
OPTIONS: dict[str, Any] = {
    "num_kv_blocks": 256,
    "max_num_batched_tokens": CHUNK_LEN,
    "max_num_seqs": 4,
    "audit": True,
}


class Stages(TwoRoles):
    """Two roles that do something when the first chunk is lent, or when a sequence with a token is placed."""

    def on(self, stage: str, act: Callable[[], None]) -> Stages:
        self.stage, self.act = stage, act
        return self

    def _reach(self, stage: str) -> None:
        if stage == self.stage:
            self.stage = ""
            self.act()

    def choose(self, request: Request, stage: Stage) -> Placement | None:
        if stage is Stage.BRINGS_KV:
            self._reach("first chunk")
        return super().choose(request, stage)

    async def wait_for_replica(self, request: Request, timeout_s: float | None, stage: Stage) -> Placement:
        self._reach("first token")
        return await super().wait_for_replica(request, timeout_s, stage)


def prompt_of(number: int) -> list[int]:
    prompt: list[int] = np.random.default_rng(number).integers(300, 1000, PROMPT_LEN).tolist()
    return prompt


async def serve(
    replicas: tuple[ReplicaProcess, ...], number: int, stage: str, victim: str
) -> tuple[list[int], list[int], ReplicaStatus]:
    """Serve a prompt by two replicas, one of which is killed at a stage.

    Returns:
        Its tokens; those of one replica, with another salt, so that nothing is cached; and that replica's status.
    """
    async with clients_of(*replicas) as (prefill, decode):
        request = make_request(prompt_of(number), NUM_TOKENS)
        killed = replicas[0] if victim == "prefill" else replicas[1]
        picker = Stages(prefill, decode).on(stage, killed.kill)
        running = MigratingRequest(request, picker)
        running.start()
        tokens, _ = await token_times(running)
        left = prefill if victim == "decode" else decode
        status = await left.status(DEADLINE_S)
        alone = left.submit(make_request(prompt_of(number), NUM_TOKENS, salt=b"alone"))
        expected = [token async for _, update in alone for token in update.token_ids]
        return tokens, expected, status


def run(model: Path, number: int, stage: str = "", victim: str = "") -> ReplicaStatus:
    with replica_processes(str(model), ("prefill", "decode"), lends_small=True, **OPTIONS) as replicas:
        serving = serve(replicas, number, stage, victim)
        tokens, expected, status = asyncio.run(asyncio.wait_for(serving, DEADLINE_S))
    assert len(expected) == NUM_TOKENS
    assert tokens == expected
    return status


def test_chunks_travel_between_processes(demo_model_dir: Path) -> None:
    """A process that has to wait for a processor may read too late; then the tokens are computed, and are right."""

    def have_all_travelled(status: ReplicaStatus) -> bool:
        is_whole = status.num_kv_ahead_tokens == PROMPT_LEN // CHUNK_LEN * CHUNK_LEN
        return is_whole and not sum(status.num_kv_failures)

    assert any(have_all_travelled(run(demo_model_dir, number)) for number in range(MOST_TRIES))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize("stage", ["first chunk", "first token"])
def test_killed_side_costs_no_token(demo_model_dir: Path, stage: str, victim: str) -> None:
    run(demo_model_dir, 1, stage, victim)
