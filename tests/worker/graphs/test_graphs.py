"""StepGraphs: replayed steps give the same tokens as computed ones for any batches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import ATTENTION, MLP, VOCABULARY, put_adapters, write_adapter
from pooling_models import EmbeddingReference
from ranked_driver import RankedDriver
from reference import Reference
from state_kinds import STATE_KINDS
from tape import TapeBackend, on_one_launch
from taped_ops import latent_decode, put_collectives_on_tape, put_ops_on_tape
from torch import Tensor
from vision_kinds import VISION_KINDS
from vision_models import save_model

from quire.kernels import lora, recurrence, sparse_latent
from quire.kernels.native import ops as cpu
from quire.kernels.state_runs import StateRuns
from quire.proto.config import LoraConfig, PoolingConfig, SpeculativeConfig
from quire.proto.lora import NO_SLOT, LoraReference
from quire.proto.pooling import PoolingParams
from quire.proto.step import PromptScoring, RowSampling, StepPlan
from quire.worker.graphs.graph_adapters import GraphAdapters
from quire.worker.graphs.graph_shapes import NUM_CHUNKS
from quire.worker.graphs.graphs import Recording
from quire.worker.lora.step_adapters import make_step_adapters
from quire.worker.models.mixers import pooled_mla, short_conv
from quire.worker.rank import rank_memory

GREEDY = RowSampling(temperature=0.0)
# Of a PaliGemma whose text model has neither windows nor a soft cap, which the ops of the tape do not have.
SEED_OF_GEMMA_1 = 0


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> TapeBackend:
    """A tape that records every operation, because none runs in C++."""
    put_ops_on_tape(monkeypatch)
    return TapeBackend()


@pytest.fixture
def engine(make_model: Any, make_engine: Any, backend: TapeBackend) -> Any:
    return make_engine(make_model("qwen3", seed=5), 1, num_blocks=64, block_size=4, max_num_seqs=6,
                       graph_backend=backend)  # fmt: skip


def test_replayed_steps_give_same_tokens_as_computed_steps(
    engine: Any, backend: TapeBackend, make_model: Any, make_engine: Any, planned: Any
) -> None:
    """Batches grow and shrink across graph sizes and reuse blocks of finished sequences."""
    lengths = [3, 9, 2, 17, 5, 8, 30, 4, 6]
    prompts = [[(7 * place + 31 * index) % 380 + 1 for place in range(n)] for index, n in enumerate(lengths)]

    def run(engine: Any) -> list[list[int]]:
        sequences = [
            planned(prompt, 12 + index, GREEDY, arrival=3 * index) for index, prompt in enumerate(prompts)
        ]
        engine.generate(sequences)
        return [sequence.generated for sequence in sequences]

    plain = run(make_engine(make_model("qwen3", seed=5), 1, num_blocks=64, block_size=4, max_num_seqs=6))
    assert run(engine) == plain
    first = backend.num_replays
    assert first > 0
    assert run(engine) == plain
    assert backend.num_replays > first


def test_padding_writes_no_blocks(engine: Any, backend: TapeBackend, planned: Any) -> None:
    """Three rows replay the graph of four; besides their blocks only block 0, for padding, may change."""
    sequences = [planned([5, 6, 7 + index], 10, GREEDY) for index in range(3)]
    engine.generate(sequences)
    assert backend.num_replays > 0
    (runner,) = engine.runners
    used = runner.memory.kv.cache.layers[0].blocks.flatten(1).any(dim=1).nonzero().flatten().tolist()
    # 3 sequences of 3 prompt and 9 computed output tokens, in blocks of 4.
    assert len([block for block in used if block]) == 3 * 3


def test_finished_row_becomes_padding(engine: Any, backend: TapeBackend, planned: Any) -> None:
    """Otherwise a replay would write to blocks that belong to other sequences now."""
    sequences = [planned([5, 6, 7 + index], 8 + 4 * (index > 0), GREEDY) for index in range(4)]
    engine.generate(sequences)
    (runner,) = engine.runners
    assert backend.num_replays > 8
    assert (runner.memory.executor.graphs._slot_mappings[0] < 0)[:4].tolist() == [False] * 3 + [True]
    assert (runner.memory.executor.graphs._seq_lens == 0)[:4].tolist() == [False] * 3 + [True]


def test_seeded_row_samples_same_tokens(engine: Any, backend: TapeBackend, planned: Any) -> None:
    sampling = RowSampling(temperature=0.9, top_p=0.9, seed=11, logprobs=2)
    tokens = []
    for _ in range(2):
        sequences = [planned([9, 10, 11], 12, sampling), planned([4], 9, GREEDY)]
        engine.generate(sequences)
        tokens.append([sequence.generated for sequence in sequences])
    assert tokens[0] == tokens[1]
    assert backend.num_replays > 0


def test_all_graphs_are_recorded_before_the_first_step(
    make_model: Any, make_engine: Any, backend: TapeBackend, planned: Any
) -> None:
    """The largest first: the smaller ones use its memory."""
    sizes: list[int] = []
    record = backend.record

    def count(compute: Any) -> Recording:
        recording = record(compute)
        sizes.append(len(recording.output))
        return recording

    backend.record = count  # type: ignore[method-assign]
    engine = make_engine(make_model("llama"), 1, graph_backend=backend, max_num_seqs=6)
    (runner,) = engine.runners
    decodes = [1, 2, 4, 6, 8, 16, 22]  # with forced tokens
    assert sizes == decodes[::-1] + [6 + NUM_CHUNKS] * 3
    assert [shape.num_decodes for shape in runner.memory.executor.graphs.shapes] == [*decodes, 6, 6, 6]
    sequences = [planned([5, 6], 9, GREEDY), planned([7], 4, GREEDY)]
    engine.generate(sequences)
    assert backend.num_recorded == 7 + 3
    assert backend.num_replays == 9  # all steps


def test_graphs_hold_all_drafts_of_a_step(make_model: Any, make_engine: Any, backend: TapeBackend) -> None:
    settings: dict[str, Any] = {"max_num_seqs": 4, "speculative": SpeculativeConfig("ngram", 3)}
    engine = make_engine(make_model("llama"), 1, graph_backend=backend, **settings)
    assert max(shape.num_decodes for shape in engine.runners[0].memory.executor.graphs.shapes) == 4 + 4 * 3


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("qwen3", {}), ("deepseek_v3", {"first_k_dense_replace": 3})],
    ids=["heads", "latents"],
)
def test_graphs_of_steps_with_chunks_give_same_tokens(
    make_model: Any, make_engine: Any, planned: Any, backend: TapeBackend, kind: str, fields: dict[str, Any]
) -> None:
    """Prompts arrive while other sequences decode, end in the middle of a step, and are too many for a graph."""
    lengths = [3, 70, 2, 33, 5, 90, 30, 4, 6, 41, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    prompts = [[(7 * place + 31 * index) % 380 + 1 for place in range(n)] for index, n in enumerate(lengths)]
    arrivals = [0, 1, 2, 2, 3, 5, 7, 7, 9, 9] + [20] * 9
    folder = make_model(kind, seed=5, **fields)

    def run(**settings: Any) -> list[list[int]]:
        sequences = [
            planned(prompt, 6, GREEDY, arrival=arrival)
            for prompt, arrival in zip(prompts, arrivals, strict=True)
        ]
        engine = make_engine(folder, 1, num_blocks=200, block_size=4, max_num_seqs=20, **settings)
        engine.generate(sequences, chunk_len=16)
        return [sequence.generated for sequence in sequences]

    expected = run()
    assert run(graph_backend=backend) == expected
    assert backend.num_replays > 20


def scores_of_keys(
    q: Tensor, weights: Tensor, keys: Tensor, block_tables: Tensor, rows: Tensor, lens: Tensor, top_k: int
) -> Tensor:
    """Behave as the kernel, which gives any numbers for keys behind a query's."""
    scores = sparse_latent.index_scores(q, weights, keys, block_tables, rows, lens, top_k)
    return scores.masked_fill(torch.arange(scores.shape[1]) >= lens.unsqueeze(1), torch.nan)


def test_graphs_of_pools_of_tokens_give_same_tokens(
    make_model: Any, make_engine: Any, planned: Any, backend: TapeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host knows neither which pools a step completes nor which tokens a query attends to."""
    fields = STATE_KINDS["glm5_next_text"] | {
        "layer_types": ["indexed_attention"] * 3,
        "indexer_types": ["full", "shared", "full"],
        "mlp_layer_types": ["dense"] * 3,
    }
    folder = make_model("glm5_next_text", seed=5, **fields)
    on_tape = on_one_launch("decode_of_chosen_tokens", latent_decode)
    monkeypatch.setattr(sparse_latent, "is_available", lambda: False)
    monkeypatch.setattr(cpu, "supports_logits", lambda logits: False)
    monkeypatch.setattr(pooled_mla, "index_scores", on_one_launch("index_scores", scores_of_keys))
    monkeypatch.setattr(
        sparse_latent,
        "latent_decode_attention",
        lambda q, cache, tables, lens, scale, dim, *rest: on_tape(q, cache, tables, lens, scale, dim),
    )
    lengths = [3, 70, 2, 33, 5, 90, 30, 4]
    prompts = [[(7 * place + 31 * index) % 380 + 1 for place in range(n)] for index, n in enumerate(lengths)]

    def run(**settings: Any) -> tuple[list[list[int]], Any]:
        sequences = [planned(prompt, 12, GREEDY, arrival=index // 2) for index, prompt in enumerate(prompts)]
        engine = make_engine(
            folder, 1, num_blocks=200, block_size=4, max_num_seqs=20, num_state_slots=40, **settings
        )
        engine.generate(sequences, chunk_len=16)
        return [sequence.generated for sequence in sequences], engine.runners[0].memory.executor.graphs

    expected, _ = run()
    found, graphs = run(graph_backend=backend)
    assert found == expected
    assert {shape.num_chunks > 0 for shape in graphs.shapes} == {False, True}
    assert backend.num_replays > 10


@pytest.mark.parametrize("has_adapters", [False, True])
def test_graphs_of_data_parallel_attention_give_same_tokens(
    make_model: Any,
    make_engine: Any,
    thread_group: Any,
    backend: TapeBackend,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    has_adapters: bool,
) -> None:
    """A rank attends for any number of a step's decodes and chunks, or for none."""
    put_collectives_on_tape(monkeypatch, type(thread_group(1).communicator(0)))
    folder = make_model("deepseek_v3", seed=5, first_k_dense_replace=3)
    lengths = [3, 40, 2, 33, 5, 30, 4, 6]
    prompts = [[(7 * place + 31 * index) % 380 + 1 for place in range(n)] for index, n in enumerate(lengths)]
    partitions: set[tuple[int, int]] = set()
    lora = LoraConfig(max_loras=2, max_lora_rank=8, max_cpu_loras=2) if has_adapters else None
    adapters: list[LoraReference | None] = [None]
    for seed in range(2 if has_adapters else 0):
        path = write_adapter(tmp_path / str(seed), folder, ("q_b_proj", "o_proj", "up_proj"), seed=seed)
        adapters.append(LoraReference(str(seed), str(path)))

    def run(**settings: Any) -> dict[int, list[int]]:
        engine = make_engine(folder, 2, num_blocks=80, block_size=4, max_num_seqs=6, max_num_batched_tokens=24,
                             enable_dp_attention=True, lora=lora, **settings)  # fmt: skip
        driver = RankedDriver(engine.config.with_num_blocks(80), engine.step)
        for handle, prompt in enumerate(prompts):
            adapter = adapters[handle % len(adapters)]
            driver.add(handle, prompt, max_tokens=8, ignore_eos=True, lora=adapter)
            for _ in range(3):
                driver.step(depth=2)
                state = driver.scheduler._state
                of_rows = [state.blocks.rows.partition_of(row) for row in state.running]
                partitions.add((of_rows.count(0), of_rows.count(1)))
        driver.run(depth=2)
        return driver.outputs

    expected = run()
    assert run(graph_backend=backend) == expected
    assert backend.num_replays > 20
    assert len(partitions) > 4
    assert any(min(counts) == 0 for counts in partitions)


@pytest.mark.parametrize("num_rows", [1, 6, 40])
def test_buffers_of_adapters_hold_any_mix(num_rows: int) -> None:
    """Each token is in one group of its slot, at addresses that do not change; groups behind them are empty."""
    buffers = GraphAdapters(40, 3, torch.device("cpu"))
    recorded: Any = buffers.of_rows(num_rows)
    rng = np.random.default_rng(num_rows)
    for _ in range(30):
        slots = rng.integers(-1, rng.integers(1, 4), rng.integers(1, num_rows + 1)).astype(np.int32)
        step = make_step_adapters(slots, None, torch.device("cpu"))
        if step.is_empty:
            continue
        buffers.copy(step, num_rows)
        starts, found = recorded.groups.starts.tolist(), dict[int, int]()
        for index, slot in enumerate(recorded.groups.slots.tolist()):
            own = recorded.groups.order[starts[index] : starts[index + 1]].tolist()
            assert len(own) <= lora.MAX_GROUP_LEN
            assert not found.keys() & set(own)
            found.update(dict.fromkeys(own, slot))
        assert found == {token: slot for token, slot in enumerate(slots.tolist()) if slot != NO_SLOT}
        padding = [NO_SLOT] * (num_rows - len(slots))
        assert recorded.token_slots.tolist() == slots.tolist() + padding


def test_graphs_of_steps_with_adapters_give_same_tokens(
    make_model: Any, make_engine: Any, planned: Any, backend: TapeBackend, tmp_path: Path
) -> None:
    """Rows of two adapters and of none come and go; then a slot gets the other adapter."""
    folder = make_model("qwen3", seed=5)
    settings: list[dict[str, Any]] = [
        {"modules": (*ATTENTION, *MLP, *VOCABULARY), "seed": 1},
        {"modules": ("q_proj", "down_proj"), "rank": 7, "seed": 2},
    ]
    paths = [write_adapter(tmp_path / str(index), folder, **own) for index, own in enumerate(settings)]

    def run(**settings: Any) -> list[list[int]]:
        engine = make_engine(
            folder,
            1,
            num_blocks=64,
            block_size=4,
            max_num_seqs=6,
            lora=LoraConfig(max_loras=3, max_lora_rank=8, max_cpu_loras=3),
            **settings,
        )
        put_adapters(engine, paths)
        tokens = []
        for _ in range(2):
            sequences = [
                planned([5, 6, 7 + index], 8 + index, GREEDY, arrival=index, lora_slot=slot)
                for index, slot in enumerate([0, NO_SLOT, 1, 0, 0, NO_SLOT, 1])
            ]
            engine.generate(sequences)
            tokens += [sequence.generated for sequence in sequences]
            engine.step(StepPlan(1, 1, 0, lora_slots=np.array([[0, 1]], np.int32)))
        return tokens

    expected = run()
    assert expected[0] != expected[7]
    assert run(graph_backend=backend) == expected
    assert backend.num_recorded == 7 + 3 + 7
    # In all steps but those of prompts, few of which have room in the graphs of steps without adapters.
    assert backend.num_replays >= 2 * 10


def test_step_with_prompt_logprobs_is_computed(
    make_model: Any, make_engine: Any, planned: Any, backend: TapeBackend
) -> None:
    """They need the hidden states of all tokens, which a graph does not return."""
    engine = make_engine(make_model("llama"), 1, graph_backend=backend, max_num_seqs=6)
    scored = RowSampling(temperature=0.0, scoring=PromptScoring(1, 1, 4))
    engine.generate([planned([5, 6, 7, 8], 2, scored)])
    assert backend.num_replays == 1


def test_prompts_that_attend_to_all_of_their_tokens_are_computed(
    tmp_path: Path, make_engine: Any, planned: Any, backend: TapeBackend
) -> None:
    """Also without images; graphs attend causally."""
    save_model(VISION_KINDS["paligemma"], tmp_path, SEED_OF_GEMMA_1)
    tokens = []
    for settings in ({}, {"graph_backend": backend}):
        engine = make_engine(tmp_path, 1, max_model_len=1024, num_blocks=64, max_num_seqs=6, **settings)
        sequence = planned([5, 6, 7, 8, 9, 60, 70], 4, GREEDY)
        engine.generate([sequence])
        tokens.append(sequence.generated)
    assert tokens[0] == tokens[1]
    assert backend.num_replays == 3


def test_failed_recording_disables_graphs(
    make_model: Any, make_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(TapeBackend):
        def record(self, compute: Any) -> Any:
            self.num_recorded += 1
            raise RuntimeError("the model waits\nfor its results")

    backend = Broken()
    folder = make_model("llama")
    tokens = []
    with caplog.at_level(logging.WARNING):
        for settings in ({"graph_backend": backend}, {}):
            tokens += make_engine(folder, 1, **settings).greedy([[5, 6]], 12)
    assert tokens[0] == tokens[1]
    assert backend.num_recorded == 1
    assert "disabling graphs, a step cannot be recorded: the model waits" in caplog.text
    assert "for its results" not in caplog.text


def test_failed_recording_of_one_rank_disables_graphs_on_all(
    make_model: Any, make_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Two ranks: a replay of one rank would not meet the computed step of the other."""

    class OneRankFails(TapeBackend):
        def record(self, compute: Any) -> Recording:
            self.num_recorded += 1
            if self.num_recorded == 2:
                raise RuntimeError("no such kernel")
            return Recording(fail, torch.zeros(8, 1))

    def fail() -> None:
        raise AssertionError("a graph was replayed")

    backend = OneRankFails()
    folder = make_model("llama")
    tokens = []
    with caplog.at_level(logging.WARNING):
        for settings in ({"graph_backend": backend}, {"cuda_graphs": False}):
            tokens += make_engine(folder, 2, **settings).greedy([[5, 6]], 12)
    assert tokens[0] == tokens[1]
    assert backend.num_recorded == 2
    warning = "graphs are disabled: a step of 24 decodes and 0 prompt tokens cannot be recorded on every rank"
    assert caplog.text.count(warning) == 2


@pytest.mark.parametrize(("method", "kind"), [("warm_up", RuntimeError), ("record", ConnectionError)])
def test_failed_warm_up_and_a_lost_rank_are_raised(
    make_model: Any, make_engine: Any, method: str, kind: type[Exception]
) -> None:
    """They execute a step, in whose collectives the other ranks may wait for this one."""
    backend = TapeBackend()

    def fail(compute: Any) -> Any:
        raise kind("on command")

    setattr(backend, method, fail)
    with pytest.raises(kind, match="on command"):
        make_engine(make_model("llama"), 1, graph_backend=backend)


def test_graphs_of_decodes_remain_if_others_cannot_be_recorded(
    make_model: Any, make_engine: Any, planned: Any, caplog: pytest.LogCaptureFixture, backend: TapeBackend
) -> None:
    record = backend.record

    def record_decodes(compute: Any) -> Recording:
        recording = record(compute)
        if len(recording.output) == 6 + NUM_CHUNKS:
            raise RuntimeError("no memory")
        return recording

    backend.record = record_decodes  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        engine = make_engine(make_model("llama"), 1, graph_backend=backend, max_num_seqs=6)
    assert [shape.num_decodes for shape in engine.runners[0].memory.executor.graphs.shapes] == [
        1,
        2,
        4,
        6,
        8,
        16,
        22,
    ]
    assert "a step of 6 decodes and 256 prompt tokens cannot be recorded on every rank" in caplog.text
    engine.generate([planned([5, 6], 4, GREEDY)])
    assert backend.num_replays == 3


@pytest.mark.gpu
def test_cuda_graphs_of_adapters_give_same_tokens(
    make_model: Any, make_engine: Any, planned: Any, tmp_path: Path
) -> None:
    folder: Path = make_model("llama", seed=5)
    paths = [write_adapter(tmp_path / str(seed), folder, seed=seed) for seed in range(2)]
    tokens = []
    for cuda_graphs in (True, False):
        engine = make_engine(
            folder,
            1,
            device="cuda",
            cuda_graphs=cuda_graphs,
            max_num_seqs=6,
            lora=LoraConfig(max_loras=2, max_lora_rank=8, max_cpu_loras=2),
        )
        put_adapters(engine, paths)
        sequences = [planned([3 + slot] * 4, 32, GREEDY, lora_slot=slot) for slot in (0, NO_SLOT, 1, 1, 0)]
        engine.generate(sequences)
        tokens.append([sequence.generated for sequence in sequences])
    assert tokens[0] == tokens[1]


@pytest.mark.gpu
def test_cuda_graphs_give_same_tokens_as_computed_steps(
    make_model: Any, make_engine: Any, planned: Any
) -> None:
    folder: Path = make_model("llama", seed=5)
    tokens = []
    for cuda_graphs in (True, False):
        engine = make_engine(folder, 1, device="cuda", cuda_graphs=cuda_graphs, max_num_seqs=6)
        for _ in range(2):
            sequences = [planned([3 + index] * (index + 1), 64, GREEDY) for index in range(5)]
            engine.generate(sequences)
        (runner,) = engine.runners
        assert bool(runner.memory.executor.graphs.shapes) == cuda_graphs
        tokens.append([sequence.generated for sequence in sequences])
    assert tokens[0] == tokens[1]


def test_cuda_graphs_option_disables_graphs(make_model: Any, make_engine: Any, backend: TapeBackend) -> None:
    for cuda_graphs in (False, True):
        engine = make_engine(make_model("llama"), 1, graph_backend=backend, cuda_graphs=cuda_graphs)
        assert bool(engine.runners[0].memory.executor.graphs.shapes) == cuda_graphs
        assert bool(backend.num_recorded) == cuda_graphs


def test_model_that_cannot_be_recorded_is_logged(
    make_model: Any, make_engine: Any, backend: TapeBackend, log_of: Callable[[str], list[str]]
) -> None:
    lines = log_of(rank_memory.__name__)
    for model, settings, num_logged in (
        ("gpt2", {"cuda_graphs": False}, 0), ("llama", {}, 0), ("gpt2", {}, 1),
    ):  # fmt: skip
        make_engine(make_model(model), 1, graph_backend=backend, **settings)
        logged = [line for line in lines if line.startswith("WARNING")]
        assert len(logged) == num_logged, model
    assert logged[0].startswith("WARNING: graphs are disabled: each step of this model reads results back")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("qwen3", {}), ("olmo3", {"sliding_window": 24}), ("deepseek_v3", {"first_k_dense_replace": 3})],
    ids=["heads", "groups", "latents"],
)
def test_replays_read_nothing_that_earlier_steps_left(
    make_model: Any, make_engine: Any, planned: Any, backend: TapeBackend, kind: str, fields: dict[str, Any]
) -> None:
    """Before each replay, the buffers hold the largest numbers that a step of the largest graph could have."""
    lengths = [3] * 10 + [200, 2, 30, 5, 1]
    prompts = [[(7 * place + 31 * index) % 380 + 1 for place in range(n)] for index, n in enumerate(lengths)]

    def run(**settings: Any) -> list[list[int]]:
        engine = make_engine(
            make_model(kind, seed=5, **fields), 1, num_blocks=200, block_size=4, max_num_seqs=16, **settings
        )
        graphs = engine.runners[0].memory.executor.graphs
        if settings:
            spoil_before_replays(graphs)
        sequences = [
            planned(prompt, 8 + index % 3 if index < 6 else 3, GREEDY, arrival=max(0, index - 8))
            for index, prompt in enumerate(prompts)
        ]
        engine.generate(sequences, chunk_len=200)
        return [sequence.generated for sequence in sequences]

    expected = run()
    assert run(graph_backend=backend) == expected
    assert backend.num_replays > 5


def spoil_before_replays(graphs: Any) -> None:
    """Have every replay begin with what the largest step may have left in the buffers of its inputs."""
    replay = graphs.replay
    left = {
        "_sampled_index": len(graphs._token_ids) - 1,
        "_query_start": len(graphs._token_ids),
        "_seq_lens": 4,
        "_slot_mappings": 40,
    }

    def replay_after_larger_step(batch: Any) -> Any:
        for name, value in left.items():
            getattr(graphs, name).fill_(value)
        return replay(batch)

    graphs.replay = replay_after_larger_step


def test_pooled_prompt_beside_decodes_is_not_replayed(
    backend: TapeBackend, make_model: Any, make_engine: Any
) -> None:
    """A graph computes logits only; the pooled row needs hidden states."""
    settings: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    folder, pooling = make_model("qwen3", seed=5), PoolingConfig("last", 64, activation="normalize")
    engine = make_engine(folder, 1, num_blocks=64, graph_backend=backend, pooling=pooling, **settings)
    driver = RankedDriver(engine.config.with_num_blocks(64), engine.step)
    driver.add(0, [5, 6, 7], max_tokens=8, ignore_eos=True)
    driver.step()
    driver.add(1, [9, 10, 11, 12], pooling=PoolingParams())
    driver.run()
    expected = EmbeddingReference(folder).embed([9, 10, 11, 12])
    np.testing.assert_allclose(driver.vectors[1], expected, atol=1e-4)
    Reference(folder).check_greedy([5, 6, 7], driver.outputs[0])


def conv(
    x: Tensor, weight: Tensor, states: Tensor, slots: Tensor, starts: Tensor, is_new: Tensor, silu: bool
) -> Tensor:
    """Behave as the kernel, which gives any numbers for tokens outside all runs."""
    runs = StateRuns(slots, starts, is_new, len(x))
    out = recurrence.causal_conv(x, weight, None, states, runs, silu=silu)
    out[int(starts[-1]) :] = torch.nan
    return out


def test_replayed_steps_read_and_write_the_states_of_their_rows(
    make_model: Any, make_engine: Any, backend: TapeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of few decodes and of chunks, with padding, which ends in the scratch slot."""
    op = torch.library.custom_op("quire_tests::conv", conv, mutates_args=("states",))

    def causal_conv(
        x: Tensor, weight: Tensor, bias: None, states: Tensor, runs: StateRuns, *, silu: bool
    ) -> Tensor:
        if runs.shorter is not None:  # a cut, which is not recorded
            return recurrence.causal_conv(x, weight, bias, states, runs, silu=silu)
        result: Tensor = op(x.contiguous(), weight, states, runs.slots, runs.starts, runs.is_new, silu)
        return result

    monkeypatch.setattr(short_conv, "causal_conv", causal_conv)
    folder = make_model("lfm2", seed=7, **STATE_KINDS["lfm2"])
    engine = make_engine(
        folder, 1, block_size=4, num_blocks=64, max_num_seqs=6, num_state_slots=12,
        max_num_batched_tokens=32, graph_backend=backend,
    )  # fmt: skip
    driver, prompts = RankedDriver(engine.config.with_num_blocks(64), engine.step), {}
    for handle, length in enumerate([9, 21, 3, 14, 30]):
        prompts[handle] = [(7 * place + 31 * handle) % 380 + 1 for place in range(length)]
        driver.add(handle, prompts[handle], max_tokens=8, ignore_eos=True)
        driver.step(2)
    driver.finish(prompts, Reference(folder), 8)
    (runner,) = engine.runners
    shapes = runner.memory.executor.graphs.shapes
    assert {shape.num_chunks > 0 for shape in shapes} == {False, True}
    assert backend.num_replays > 8
