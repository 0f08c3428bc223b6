"""Sequences of models that keep states move between two engines with their blocks and state, token for token."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fake_nixl import FakeNixl
from model_kinds import model_type_of
from ranked_driver import RankedDriver
from reference import Reference, prompts_of
from state_kinds import STATE_KINDS

from quire.worker.transfer.nixl import NixlEnd

NUM_TOKENS, NUM_PREFIX_TOKENS = 10, 28


@pytest.fixture(autouse=True)
def patient_pulls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no pull fail because a thread had to wait for a processor."""
    monkeypatch.setattr("quire.worker.transfer.service.SILENCE_S", 60.0)
    monkeypatch.setattr("quire.scheduler.core.queue.kv_moves.MIN_PULL_TIMEOUT_S", 60.0)


def open_replicas(
    make_engine: Any, folder: Path, sizes: tuple[int, int], sockets: Path, transport: str = "auto"
) -> list[RankedDriver]:
    """Return two replicas of so many ranks each, which serve each other."""
    found = list[RankedDriver]()
    for number, tp in enumerate(sizes):
        engine = make_engine(
            folder, tp, block_size=4, max_num_seqs=4, num_state_slots=12, kv_transfer=True,
            kv_transport=transport, num_blocks=256,
        )  # fmt: skip
        for rank, runner in enumerate(engine.runners):
            runner.serve_blocks(f"ipc://{sockets}/{number}-{rank}.kv", None)
        found.append(RankedDriver(engine.config.with_num_blocks(engine.num_blocks), engine.step))
        found[-1].add(0, [2, 3], max_tokens=1)
        found[-1].run()
        assert found[-1].scheduler.kv_moves.kv_layout, "the ranks do not serve"
    return found


def step_until(driver: RankedDriver, condition: Callable[[], bool]) -> None:
    """Run steps; those without anything to compute wait a moment for the other replica."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "nothing more happens"
        driver.step()


@pytest.mark.parametrize("ends_early", [False, True], ids=["lent", "stale"])
@pytest.mark.parametrize(
    ("kind", "tp"),
    [
        ("lfm2", 1),
        ("qwen3_next", 2),
        ("kimi_linear", 1),
        ("mamba", 1),
        ("lfm3", 1),
        ("qwen4_exp_text", 1),
        ("glm5_next_text", 1),
    ],
)
def test_sequence_moves_with_its_state(
    kind: str, tp: int, ends_early: bool, make_model: Any, make_engine: Any, tmp_path: Path
) -> None:
    folder = make_model(model_type_of(kind), seed=7, **STATE_KINDS[kind])
    move_sequence(folder, open_replicas(make_engine, folder, (tp, tp), tmp_path), ends_early=ends_early)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("qwen3_next", (1, 2)),
        ("qwen3_next", (2, 1)),
        ("qwen3_next", (4, 1)),  # pairs of ranks share a key head
        ("nemotron_h", (1, 2)),
        ("nemotron_h", (4, 2)),
        ("kimi_linear", (2, 1)),
        ("minimax", (1, 2)),
        ("mamba", (1, 2)),
        ("mamba", (4, 2)),
        ("jamba", (2, 1)),
        ("lfm2", (1, 2)),
        ("lfm2", (4, 1)),
        ("recurrent_gemma", (2, 1)),
        ("recurrent_gemma", (1, 4)),
        ("zaya", (1, 2)),
        ("zaya", (4, 2)),  # pairs of ranks share a key head
        ("deepseek_v4", (2, 1)),
        ("deepseek_v4", (1, 4)),
        ("qwen4_exp_text", (2, 1)),
    ],
)
def test_state_is_sliced_and_joined_between_tensor_parallel_sizes(
    kind: str, sizes: tuple[int, int], make_model: Any, make_engine: Any, tmp_path: Path
) -> None:
    folder = make_model(model_type_of(kind), seed=7, **STATE_KINDS[kind])
    replicas = open_replicas(make_engine, folder, sizes, tmp_path)
    # All of its layers with keys have a window, behind which no blocks are left.
    num_pulled = 8 if kind == "recurrent_gemma" else NUM_PREFIX_TOKENS
    move_sequence(folder, replicas, ends_early=False, num_pulled=num_pulled)


@pytest.mark.parametrize(("kind", "sizes"), [("qwen3_next", (1, 2)), ("lfm2", (1, 1))])
@pytest.mark.parametrize("is_installed", [False, True], ids=["fake", "package"])
def test_sequence_moves_by_nixl(
    kind: str, sizes: tuple[int, int], is_installed: bool, make_model: Any, make_engine: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    network = FakeNixl()
    if is_installed:
        pytest.importorskip("nixl._api")
        monkeypatch.setenv("UCX_TLS", "tcp,self")
    else:
        network.install(monkeypatch)
    begun = mock.Mock(side_effect=NixlEnd.begin)
    monkeypatch.setattr(NixlEnd, "begin", lambda *args: begun(*args))
    folder = make_model(model_type_of(kind), seed=7, **STATE_KINDS[kind])
    move_sequence(folder, open_replicas(make_engine, folder, sizes, tmp_path, "nixl"), ends_early=False)
    assert begun.called, "the blocks came another way"
    assert is_installed == (network.num_reads == 0)


def move_sequence(
    folder: Path, replicas: list[RankedDriver], *, ends_early: bool, num_pulled: int = NUM_PREFIX_TOKENS
) -> None:
    """Move a sequence after its first token from the first replica to the second, and compare its output."""
    source, target = replicas
    (prompt,) = prompts_of([29], seed=1)
    source.add(1, prompt, max_tokens=NUM_TOKENS, ignore_eos=True, prefill_only=True)
    while 1 not in source.moved:
        source.step()
    offer = source.moved[1].kv
    assert offer is not None
    assert offer.num_blocks == 7
    assert offer.state_slot > 0
    source.step()  # the ranks learn of the lease
    if ends_early:
        source.now += 60.0
        source.step()
    target.outputs[1] = []
    generated = source.outputs[1]
    target.add(1, prompt, max_tokens=NUM_TOKENS, ignore_eos=True, generated=generated, kv=offer)

    step_until(target, lambda: 1 in target.finishes)
    moves = target.scheduler.kv_moves
    assert moves.num_kv_pulled_tokens == (0 if ends_early else num_pulled)
    assert sum(moves.num_kv_failures) == ends_early
    assert target.finishes[1].num_cached_tokens == (0 if ends_early else NUM_PREFIX_TOKENS)
    Reference(folder).check_greedy(prompt, generated + target.outputs[1])

    step_until(source, lambda: source.scheduler.kv_moves.num_kv_leases == 0)
    for driver in (source, target):
        assert driver.scheduler.blocks.state_slots.num_held == 0
