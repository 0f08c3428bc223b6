"""Transfers between processes of which each side is killed at each stage, for models with and without states."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import READY_TIMEOUT_S
from model_kinds import model_type_of
from reference import Reference
from state_kinds import STATE_KINDS

from benchmarks.replica_processes import (
    ReplicaProcess,
    TwoRoles,
    clients_of,
    make_request,
    replica_processes,
    token_times,
)
from quire.cluster.gateway.routing.request_migration import MigratingRequest
from quire.worker.transfer.kv_blocks import KvBlocks
from quire.worker.transfer.peers import Peer
from quire.worker.transfer.service import KvService
from quire.worker.transfer.transport import ZmqTransport

PROMPT_LEN, CHUNK_LEN, NUM_TOKENS = 96, 32, 24
OPTIONS: dict[str, Any] = {
    "num_kv_blocks": 128,
    "block_size": 8,
    "max_num_batched_tokens": CHUNK_LEN,
    "max_num_seqs": 4,
    "audit": True,
}
LENDER, READER = "prefill", "decode"
# stage |-> the role of the process that is killed, what it does there, and whether it has done it then.
STAGES: dict[str, tuple[str, type, str, bool]] = {
    "copied": (READER, KvBlocks, "copy_from", True),
    "granted": (LENDER, KvBlocks, "mark_written", True),
    "greeted": (LENDER, ZmqTransport, "_welcome", False),
    "asked": (LENDER, ZmqTransport, "_check", False),
    "answered": (LENDER, KvService, "on_read", True),
    "released": (LENDER, KvService, "on_release", True),
    "ordered": (READER, KvService, "_pull", False),
    "connected": (READER, Peer, "hello", True),
    "pulled": (READER, KvService, "_pull", True),
    "ended": (READER, KvService, "_release", False),
}


def kill_at(stage: str, role: str) -> None:
    """Have this process kill itself at a stage, if it has the role."""
    victim, kind, method, is_done = STAGES[stage]
    if role != victim:
        return
    original = getattr(kind, method)

    def die(*args: Any) -> None:
        if is_done:
            original(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(kind, method, die)


async def serve(replicas: tuple[ReplicaProcess, ...], prompt: list[int]) -> list[int]:
    """Return the tokens of a prompt that one replica computes and the other continues."""
    async with clients_of(*replicas) as (prefill, decode):
        running = MigratingRequest(make_request(prompt, NUM_TOKENS), TwoRoles(prefill, decode))
        running.start()
        tokens, _ = await token_times(running)
        return tokens


# Each starts two processes.
CASES = [(kind, stage) for kind in ("qwen3_next", "bamba", "llama") for stage in STAGES]


@pytest.mark.parametrize(
    ("kind", "stage"),
    [pytest.param(*each, marks=[] if each == CASES[0] else pytest.mark.slow) for each in CASES],
)
def test_killed_side_costs_no_token(kind: str, stage: str, make_model: Callable[..., Path]) -> None:
    folder = make_model(model_type_of(kind), seed=7, **STATE_KINDS.get(kind, {}))
    prompt: list[int] = np.random.default_rng(5).integers(3, 90, PROMPT_LEN).tolist()
    with replica_processes(
        str(folder), (LENDER, READER), lends_small=True, prepare=partial(kill_at, stage), **OPTIONS
    ) as replicas:
        tokens = asyncio.run(asyncio.wait_for(serve(replicas, prompt), READY_TIMEOUT_S))
        lender, reader = (each.process for each in replicas)
        victim, survivor = (lender, reader) if STAGES[stage][0] == LENDER else (reader, lender)
        victim.join(READY_TIMEOUT_S)
        assert victim.exitcode == -signal.SIGKILL, "the transfer has not come to this stage"
        assert survivor.is_alive()
    assert len(tokens) == NUM_TOKENS
    Reference(folder).check_greedy(prompt, tokens)
