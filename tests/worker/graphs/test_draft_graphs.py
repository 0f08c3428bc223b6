"""DraftGraphs: on the stand-in GPU, drafts of graphs equal those that are computed token by token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_heads import make_target_with_head
from guided_drafts import GuidedDrafts
from kernel_references import find_reference
from ranked_driver import RankedDriver
from stand_in_gpu import StandInGpu, installed
from tape import TapeBackend
from taped_ops import put_collectives_on_tape, put_ops_on_tape
from torch import Tensor

from benchmarks.draft_lengths import fixed_lengths
from quire.proto.block_tables import IntArray, RowArray
from quire.worker.graphs.draft_graphs import DraftGraphs
from quire.worker.sampling.sampler import Sampler
from quire.worker.speculation.head_proposer import HeadProposer, NoRecordedDrafts, RecordedDrafts
from quire.worker.speculation.pending_pairs import Pairs
from quire.worker.step.device_rows import DeviceRows

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")

NUM_DRAFTS, NUM_BLOCKS = 3, 64
PROMPTS = [np.random.default_rng(seed).integers(2, 380, 3 + 7 * seed).tolist() for seed in range(3)]
PLAIN: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.7, "seed": 3}, {"temperature": 0.0}]
GREEDY: list[dict[str, Any]] = [{"temperature": 0.0}] * 3
TRUNCATED: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 4, "top_p": 0.8},
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 5, "top_k": 9, "min_p": 0.05},
]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    with installed(monkeypatch, stand_in=find_reference) as gpu:
        yield gpu


@pytest.fixture(scope="module")
def make_head(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`make_head(kind) -> (target, SpeculativeConfig)`."""
    folder = tmp_path_factory.mktemp("heads")
    return lambda kind: make_target_with_head(make_model, folder, kind, NUM_DRAFTS)


@pytest.fixture
def make_drafting_engine(make_head: Any, make_engine: Any) -> Any:
    def make(kind: str, pp: int = 1, tp: int = 1, **settings: Any) -> Any:
        target, speculative = make_head(kind)
        sizes = {
            "block_size": 4,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": 128,
            "pp": pp,
            "device": "cuda",
        }
        return make_engine(target, tp, NUM_BLOCKS, speculative=speculative, **sizes | settings)

    return make


def generate(
    engine: Any, settings: list[dict[str, Any]], num_tokens: int = 6, *, drafts: bool = True
) -> RankedDriver:
    config = engine.config.with_num_blocks(NUM_BLOCKS)
    driver = RankedDriver(config if drafts else replace(config, speculative=None), engine.step)
    with fixed_lengths(100):
        for handle, (prompt, own) in enumerate(zip(PROMPTS, settings, strict=True)):
            driver.add(handle, prompt, max_tokens=num_tokens + handle, ignore_eos=True, **own)
        driver.run(1)
    driver.empty_ranks()
    return driver


def take_best(sampler: Sampler, logits: Tensor, *_: Any) -> Tensor:
    """Take the most likely token of greedy rows by operations that a tape records on a CPU."""
    best, columns = logits.max(dim=-1)
    return sampler._best_of_ranks(best, (columns + sampler._shard.start).int())


def guide_of(engine: Any, settings: list[dict[str, Any]], num_tokens: int) -> GuidedDrafts:
    """Return a guide to the outputs that the engine gives without drafts."""
    plain = generate(engine, settings, num_tokens, drafts=False)
    return GuidedDrafts([PROMPTS[handle] + output for handle, output in plain.outputs.items()])


class Comparison:
    """Drafts each step by a graph, and then token by token.

    Attributes:
        pairs: drafts by both.
        num_known: numbers of known pairs of a row in a step.
        num_syncs: waits of the host while a graph drafts.
    """

    def __init__(self, engine: Any, guide: GuidedDrafts, gpu: StandInGpu | None = None) -> None:
        self.pairs: list[tuple[list[int], list[int]]] = []
        self.num_known = set[int]()
        self.num_syncs = 0
        self._gpu, self._guide, self._draft = gpu, guide, DraftGraphs.draft
        heads = (runner.memory.loaded.head for runner in engine.runners)
        self._proposers: dict[RecordedDrafts, HeadProposer] = {each.graphs: each for each in heads if each}
        assert all(isinstance(each, DraftGraphs) for each in self._proposers)

    @property
    def _num_waits(self) -> int:
        return 0 if self._gpu is None else sum(self._gpu.num_syncs.values())

    def draft(
        self,
        graphs: DraftGraphs,
        rows: RowArray,
        lens: IntArray,
        counts: IntArray,
        limits: IntArray,
        features: Tensor,
    ) -> None:
        before, proposer = self._num_waits, self._proposers[graphs]
        table = proposer._rows
        accepted = table.unsettled.accepted
        self._draft(graphs, rows, lens, counts, limits, features)
        self.num_syncs += self._num_waits - before
        if accepted is not None:
            gained = accepted.cpu().numpy()[rows]
            lens, counts = lens + gained, (counts + gained).astype(np.int32)
        table.unsettled.settle()
        by_graph = drafted_tokens(table, rows, limits)
        index = [place * graphs.num_pairs + np.arange(count) for place, count in enumerate(counts)]
        pairs = Pairs(rows, lens - 1 - counts, counts, features, np.concatenate(index))
        proposer._draft(rows, limits, proposer._compute(pairs))
        self.pairs.append((by_graph, drafted_tokens(table, rows, limits)))
        self.num_known.update(counts.tolist())
        self._guide.guide(graphs, rows, limits)


def drafted_tokens(table: DeviceRows, rows: RowArray, limits: IntArray) -> list[int]:
    """Return the drafted tokens of rows, of settled steps."""
    drafts = table.read_tokens(rows, table.lens[rows], table.lens[rows] + limits)
    tokens: list[int] = np.concatenate(drafts).tolist()
    return tokens


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
    engine = make_drafting_engine(kind, pp)
    for settings in (PLAIN, TRUNCATED):
        comparison = Comparison(engine, guide_of(engine, settings, 9), gpu)
        with monkeypatch.context() as patch:
            patch.setattr(DraftGraphs, "draft", lambda *args, own=comparison: own.draft(*args))
            generate(engine, settings, 9)
        assert len(comparison.pairs) > 3
        assert any(len(by_graph) % NUM_DRAFTS for by_graph, _ in comparison.pairs)
        assert all(by_graph == one_by_one for by_graph, one_by_one in comparison.pairs)
        assert comparison.num_syncs == 0
        assert len(comparison.num_known) > 1


def test_graphs_of_data_parallel_attention_draft_as_ops_one_by_one(
    make_drafting_engine: Any, thread_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank attends for any number of the rows, or for none; on a CPU that records every operation."""
    put_ops_on_tape(monkeypatch)
    put_collectives_on_tape(monkeypatch, type(thread_group(1).communicator(0)))
    monkeypatch.setattr(Sampler, "sample_recorded", take_best)
    engine = make_drafting_engine(
        "deepseek_v3-dense", tp=2, enable_dp_attention=True, graph_backend=TapeBackend(), device="cpu"
    )
    comparison = Comparison(engine, guide_of(engine, GREEDY, 8))
    monkeypatch.setattr(DraftGraphs, "draft", lambda *args: comparison.draft(*args))
    generate(engine, GREEDY, 8)
    assert len(comparison.pairs) > 6
    assert all(by_graph == one_by_one for by_graph, one_by_one in comparison.pairs)
    assert max(comparison.num_known) > 1


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
