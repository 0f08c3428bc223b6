"""DraftGraphs: on the stand-in GPU, drafts of graphs equal those that are computed token by token."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_heads import add_mtp, append_mtp, write_eagle3
from kernel_references import find_reference
from ranked_driver import RankedDriver
from stand_in_gpu import StandInGpu, installed
from torch import Tensor

from benchmarks.draft_lengths import fixed_lengths
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.proto.block_tables import IntArray, RowArray
from quire.proto.config import SpeculativeConfig
from quire.worker.graphs.draft_graphs import DraftGraphs
from quire.worker.speculation.head_proposer import HeadProposer, NoRecordedDrafts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")

NUM_DRAFTS, NUM_BLOCKS = 3, 64
PROMPTS = [np.random.default_rng(seed).integers(2, 380, 3 + 7 * seed).tolist() for seed in range(3)]
PLAIN: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.7, "seed": 3}, {"temperature": 0.0}]
TRUNCATED: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 4, "top_p": 0.8},
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 5, "top_k": 9, "min_p": 0.05},
]
# Targets whose last layer is also the head's |-> their settings.
APPENDED: dict[str, dict[str, Any]] = {"deepseek_v3": {}, "deepseek_v32": {"index_topk": 7}}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    with installed(monkeypatch, stand_in=find_reference) as gpu:
        yield gpu


@pytest.fixture(scope="module")
def make_head(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`make_head(kind) -> (target, SpeculativeConfig)`."""
    folder = tmp_path_factory.mktemp("heads")

    def make(kind: str) -> tuple[Path, SpeculativeConfig]:
        path, method, head = folder / kind, "mtp", None
        target = make_model(kind, **APPENDED[kind]) if kind in APPENDED else make_model("llama")
        if kind == "eagle3":
            shape, method, head = json.loads((target / "config.json").read_text()), kind, str(path)
            if not path.exists():
                write_eagle3(path, shape["vocab_size"], num_layers=shape["num_hidden_layers"])
        elif kind == "mtp":
            target = path if path.exists() else add_mtp(target, path, mimo=False)
        else:
            target = append_mtp(target, path)
        text = json.dumps({"method": method, "model": head, "num_speculative_tokens": NUM_DRAFTS})
        options = EngineOptions(
            str(target), device="cpu", speculative_config=text, dtype="float32", max_model_len=128
        )
        speculative = resolve(options, Machine(1, 0)).speculative
        assert speculative is not None
        return target, speculative

    return make


@pytest.fixture
def make_drafting_engine(make_head: Any, make_engine: Any) -> Any:
    def make(kind: str, pp: int = 1) -> Any:
        target, speculative = make_head(kind)
        sizes = {
            "block_size": 4,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": 128,
            "pp": pp,
        }
        return make_engine(target, 1, NUM_BLOCKS, device="cuda", speculative=speculative, **sizes)

    return make


def generate(engine: Any, settings: list[dict[str, Any]], num_tokens: int = 6) -> RankedDriver:
    driver = RankedDriver(engine.config.with_num_blocks(NUM_BLOCKS), engine.step)
    with fixed_lengths(100):
        for handle, (prompt, own) in enumerate(zip(PROMPTS, settings, strict=True)):
            driver.add(handle, prompt, max_tokens=num_tokens, ignore_eos=True, **own)
        driver.run(1)
    driver.empty_ranks()
    return driver


class Comparison:
    """Drafts each step by a graph, and then token by token.

    Attributes:
        pairs: drafts by both.
        num_syncs: waits of the host while a graph drafts.
    """

    def __init__(self, gpu: StandInGpu) -> None:
        self.pairs: list[tuple[list[int], list[int]]] = []
        self.num_syncs = 0
        self._gpu, self._draft = gpu, HeadProposer._draft

    def draft(self, proposer: HeadProposer, rows: RowArray, limits: IntArray, hidden: Tensor) -> None:
        if not rows.size:
            return
        graphs, before = proposer.graphs, sum(self._gpu.num_syncs.values())
        self._draft(proposer, rows, limits, hidden)
        self.num_syncs += sum(self._gpu.num_syncs.values()) - before
        by_graph = self._drafted(proposer, rows, limits)
        proposer.graphs = NoRecordedDrafts()
        self._draft(proposer, rows, limits, hidden)
        proposer.graphs = graphs
        self.pairs.append((by_graph, self._drafted(proposer, rows, limits)))

    def _drafted(self, proposer: HeadProposer, rows: RowArray, limits: IntArray) -> list[int]:
        lens = proposer._rows.lens[rows]
        drafts: list[int] = np.concatenate(proposer._rows.read_tokens(rows, lens, lens + limits)).tolist()
        return drafts


@pytest.mark.parametrize(
    ("kind", "pp"),
    [
        pytest.param("eagle3", 1, marks=pytest.mark.slow),
        pytest.param("mtp", 1, marks=pytest.mark.slow),
        ("deepseek_v3", 1),
        pytest.param("deepseek_v32", 1, marks=pytest.mark.slow),
        ("eagle3", 2),
    ],
)
def test_graphs_draft_as_ops_one_by_one(
    gpu: StandInGpu, make_drafting_engine: Any, kind: str, pp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One to three rows, of which the last steps of some draft fewer tokens; the host waits for nothing."""
    engine, comparison = make_drafting_engine(kind, pp), Comparison(gpu)
    assert isinstance(engine.runners[0].memory.loaded.head.graphs, DraftGraphs)
    monkeypatch.setattr(HeadProposer, "_draft", lambda *args: comparison.draft(*args))
    for settings in (PLAIN, TRUNCATED):
        comparison.pairs.clear()
        generate(engine, settings)
        assert len(comparison.pairs) > 3
        assert any(len(by_graph) % NUM_DRAFTS for by_graph, _ in comparison.pairs)
        assert all(by_graph == one_by_one for by_graph, one_by_one in comparison.pairs)
    assert comparison.num_syncs == 0


def test_dropped_graphs_are_recorded_again(gpu: StandInGpu, make_drafting_engine: Any) -> None:
    """By a reset for another group, and after a measurement of the memory they need."""
    engine = make_drafting_engine("mtp")
    (runner,) = engine.runners
    head = runner.memory.loaded.head
    expected = generate(engine, PLAIN, 4).outputs

    def num_replays() -> int:
        before = gpu.num_replays
        assert generate(engine, PLAIN, 4).outputs == expected
        return gpu.num_replays - before

    with_graphs = num_replays()
    runner.drop_graphs()
    assert isinstance(head.graphs, NoRecordedDrafts)
    assert num_replays() == 0
    with torch.inference_mode():
        assert runner.memory._gpu_kv_bytes() > 0
    assert isinstance(head.graphs, NoRecordedDrafts)
    runner.reset(has_new_ranks=False)
    assert num_replays() == with_graphs


def test_drafts_that_cannot_be_recorded_are_computed(
    gpu: StandInGpu, make_drafting_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance, warnings = DraftGraphs._advance, []

    def read_back(graphs: DraftGraphs, token_ids: Tensor, *args: Any) -> Tensor:
        assert token_ids.max().item() >= 0
        return advance(graphs, token_ids, *args)

    monkeypatch.setattr(DraftGraphs, "_advance", read_back)
    log = logging.getLogger(DraftGraphs.__module__)
    monkeypatch.setattr(log, "warning", lambda text, *args: warnings.append(text % args))
    engine = make_drafting_engine("mtp")
    assert warnings[-1] == "drafts are not recorded: a rank cannot record those of 4 rows"
    assert generate(engine, PLAIN, 4).scheduler.stats.num_draft_tokens > 0
