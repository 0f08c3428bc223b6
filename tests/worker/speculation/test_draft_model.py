"""A draft model: outputs stay the same, and an equal model is always right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_contexts import assert_same_drafts
from quick_cases import slow_except
from ranked_driver import RankedDriver

from quire.cluster.config.model_config import describe_model
from quire.kernels.native.library import is_available
from quire.proto.config import SpeculativeConfig
from quire.worker.speculation import draft_model
from quire.worker.speculation.draft_model import DraftModelProposer

PROMPTS = [np.random.default_rng(seed).integers(2, 380, 3 + 11 * seed).tolist() for seed in range(5)]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 1.0, "seed": 4, "top_p": 0.9, "n": 2},
    {"temperature": 0.9, "seed": 5, "top_k": 20},
    {"temperature": 0.0, "repetition_penalty": 1.2},
]


def speculative(folder: Path) -> SpeculativeConfig:
    draft = replace(describe_model(folder, "draft"), dtype="float32", max_model_len=128)
    return SpeculativeConfig("draft_model", 3, draft=draft)


@pytest.fixture(scope="module")
def engines(make_model: Callable[..., Path], make_engine: Any) -> Callable[..., Any]:
    """`engines(tp, is_equal, pp=1)`: an engine whose draft model equals the target, or is another, smaller one."""

    def make(tp: int, is_equal: bool, pp: int = 1) -> Any:
        target = make_model("llama")
        draft = (
            target if is_equal else make_model("llama", seed=5, num_hidden_layers=1, num_key_value_heads=8)
        )
        return make_engine(
            target,
            tp,
            160,
            max_model_len=128,
            block_size=4,
            max_num_seqs=8,
            speculative=speculative(draft),
            pp=pp,
        )

    return make


def run(engine: Any, num_blocks: int, config: SpeculativeConfig | None, depth: int = 2) -> RankedDriver:
    driver = RankedDriver(replace(engine.config.with_num_blocks(num_blocks), speculative=config), engine.step)
    for index, (prompt, settings) in enumerate(zip(PROMPTS, SETTINGS, strict=True)):
        driver.add(10 * index, prompt, max_tokens=24, ignore_eos=True, **settings)
    driver.run(depth)
    driver.empty_ranks()
    return driver


def test_latent_draft_of_data_parallel_ranks_is_always_right(
    make_model: Callable[..., Path], make_engine: Any
) -> None:
    target = make_model("deepseek_v3", seed=7)
    engine = make_engine(
        target, 2, 160, max_model_len=128, block_size=4, max_num_seqs=8, speculative=speculative(target),
        enable_dp_attention=True,
    )  # fmt: skip
    plain = run(engine, 160, None)
    drafted = run(engine, 160, engine.config.speculative)
    assert drafted.outputs == plain.outputs
    assert sum(drafted.scheduler.stats.num_accepted) > 0.8 * drafted.scheduler.stats.num_draft_tokens
    engine.divide_blocks(24)
    preempted = run(engine, 24, engine.config.speculative)
    assert preempted.scheduler.stats.num_preemptions > 0
    assert preempted.outputs == plain.outputs


@pytest.mark.parametrize(
    ("tp", "pp", "is_equal"),
    slow_except(
        [(1, 1, True), (2, 1, False), (1, 2, True)],
        [
            (1, 1, True),
            (1, 1, False),
            (2, 1, True),
            (2, 1, False),
            (4, 1, False),
            (1, 2, True),
            (2, 3, False),
        ],
    ),
)
def test_outputs_equal_those_without_drafts(
    engines: Callable[..., Any], tp: int, pp: int, is_equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(tp, is_equal, pp)
    plain = run(engine, 160, None)
    config = engine.config.speculative
    drafted = run(engine, 160, config)
    assert drafted.outputs == plain.outputs
    stats = drafted.scheduler.stats
    if is_equal:
        # All but those of the row with a penalty, which drafts do not see.
        assert sum(stats.num_accepted) > 0.8 * stats.num_draft_tokens
        assert len(drafted.plans) < 0.6 * len(plain.plans)
    monkeypatch.setattr(draft_model, "MAX_CATCH_UP_TOKENS", 5)
    assert run(engine, 160, config).outputs == plain.outputs
    assert run(engine, 30, config).outputs == plain.outputs
    engine.forget_transfers()
    engine.on_all(lambda runner: runner.reset(has_new_ranks=True), engine.runners)
    assert run(engine, 160, config).outputs == plain.outputs


@pytest.mark.skipif(not is_available(), reason="there is no C++ compiler")
def test_drafts_of_one_call_equal_those_of_ops_one_by_one(
    engines: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(1, False)
    proposer = engine.runners[0].memory.loaded.drafts.proposer
    assert proposer._fused is not None
    drafts: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def record(rows: Any, max_lens: Any) -> Any:
        lens = DraftModelProposer.propose(proposer, rows, max_lens)
        table = proposer._rows
        starts = table.lens[rows]
        texts = table.read_tokens(rows, np.zeros_like(rows), starts + lens)
        for row, start, text in zip(rows, starts, texts, strict=True):
            drafts[tuple(text[:start].tolist()), int(table.sampling.seed[row])] = text[start:].tolist()
        return lens

    monkeypatch.setattr(proposer, "propose", record)
    fused = run(engine, 160, engine.config.speculative)
    of_one_call = drafts.copy()
    drafts.clear()
    monkeypatch.setattr(proposer, "_fused", None)
    assert run(engine, 160, engine.config.speculative).outputs == fused.outputs
    assert_same_drafts(of_one_call, drafts)
