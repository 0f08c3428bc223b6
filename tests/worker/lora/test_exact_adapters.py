"""Greedy tokens of rows with adapters equal transformers' with the adapter merged into the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import ATTENTION, MLP, VOCABULARY, load_plan, merge, put_adapters, write_adapter
from ranked_driver import RankedDriver
from reference import Reference, prompts_of
from state_kinds import STATE_KINDS

from quire.proto.codec import NO_PAIRS
from quire.proto.config import LoraConfig
from quire.proto.lora import NO_SLOT, LoraLoad, LoraReference, LoraReport
from quire.proto.step import RowSampling, StepPlan
from quire.worker.lora.adapters import RankAdapters

GREEDY = RowSampling(temperature=0.0)
LORA = LoraConfig(max_loras=3, max_lora_rank=8, max_cpu_loras=4)
# Different ranks and modules in one batch; the second changes a part of each fused layer.
ADAPTERS: list[dict[str, Any]] = [
    {"modules": (*ATTENTION, *MLP, *VOCABULARY), "rank": 4, "seed": 1},
    {"rank": 8, "modules": ("q_proj", "v_proj", "up_proj", "lm_head"), "use_rslora": True, "seed": 2},
    {
        "modules": (*ATTENTION, "down_proj", "embed_tokens"),
        "rank": 3,
        "rank_pattern": {"v_proj": 7},
        "alpha_pattern": {"o_proj": 2},
        "seed": 3,
    },
]
FUSED = [
    {"modules": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), "rank": 5, "seed": 1},
    {"modules": ("qkv_proj",), "rank": 2, "seed": 2},
]
KINDS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "llama": ({}, ADAPTERS),
    # With adapters of the embedding and the head, of one of them, and of neither; a scaled embedding and a soft cap.
    "gemma2": (
        {"tie_word_embeddings": True},
        [
            {"modules": (*ATTENTION, *VOCABULARY), "size": 4, "seed": 1},
            {"modules": ("lm_head",), "rank": 8, "size": 4, "use_rslora": True, "seed": 2},
            {"modules": ("embed_tokens",), "rank": 3, "size": 4, "seed": 3},
        ],
    ),
    "phi3": ({"num_key_value_heads": 8}, FUSED),
    # With adapters of every expert, of some matrices of them, and of none.
    "qwen3_moe": (
        {"mlp_only_layers": [1]},
        [
            {"modules": ATTENTION + MLP, "seed": 4},
            {
                "modules": ("up_proj", "down_proj"),
                "rank": 7,
                "rank_pattern": {"experts.1.up_proj": 2},
                "seed": 8,
            },
            {"modules": ATTENTION, "seed": 9},
        ],
    ),
    "qwen3_moe-stacked": (
        {"mlp_only_layers": [1], "checkpoint": {"save_original_format": False}},
        [
            {  # patterns as PEFT 0.21 writes them for experts that were modules of their own
                "modules": ("q_proj", "gate_up_proj", "down_proj"),
                "rank_pattern": {r".*\.gate_up_proj": 8},
                "alpha_pattern": {r".*\.gate_up_proj": 24},
                "seed": 4,
            },
            {"modules": ("gate_up_proj", "down_proj"), "rank": 3, "stacks": "eio", "seed": 8},  # of PEFT 0.18
            {"modules": ("down_proj",), "rank": 8, "seed": 9},
        ],
    ),
    "gpt_oss": ({}, [{"modules": ("v_proj", "gate_up_proj", "down_proj"), "stacks": "eio", "seed": 4}]),
    "llama4_text": ({}, [{"modules": ("gate_up_proj", "down_proj"), "stacks": "eio", "seed": 4}]),
    "qwen2_moe": ({}, [{"modules": (*MLP, "gate", "shared_expert_gate"), "seed": 4}]),
    "deepseek_v3": ({}, [{"modules": (*MLP, "gate"), "seed": 4}]),
    "deepseek_v32": ({"index_topk": 7}, [{"modules": (*MLP, "gate", "o_proj"), "seed": 4}]),
    "mixtral": ({}, [{"modules": ("w1", "w2", "w3"), "seed": 4}]),
    # With adapters of attention and of the indexer, whose modules have the same names.
    "minimax_m3_vl_text": ({}, [{"modules": ("q_proj", "k_proj", "o_proj", "gate_up_proj"), "seed": 17}]),
    "gemma3_text": ({}, [{"modules": ATTENTION + MLP, "seed": 5}]),
    # With layers that keep a state.
    "lfm2": (STATE_KINDS["lfm2"], [{"modules": ("in_proj", "out_proj", "q_proj", "w1", "w2"), "seed": 10}]),
    "qwen3_next": (
        STATE_KINDS["qwen3_next"],
        [{"modules": ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"), "seed": 11}],
    ),
    "bamba": (STATE_KINDS["bamba"], [{"modules": ("in_proj", "out_proj", "v_proj", *MLP), "seed": 12}]),
    # With a residual of several streams.
    "deepseek_v4": (
        STATE_KINDS["deepseek_v4"] | {"checkpoint": {"save_original_format": False}},
        [
            {"modules": ("q_a_proj", "q_b_proj", "kv_proj", "o_b_proj", *MLP), "seed": 13},
            {"modules": ("gate_up_proj", "down_proj"), "seed": 14},
        ],
    ),
    "hy_v4": ({}, [{"modules": ("o_proj", *MLP), "seed": 16}]),
    "qwen4_exp_text": (
        STATE_KINDS["qwen4_exp_text"],
        [
            {
                "modules": ("in_proj_qkv", "in_proj_z", "out_proj", "o_proj", "index_qk_proj", *MLP),
                "seed": 18,
            },
            {"modules": ("q_proj", "in_proj_a", "gate"), "seed": 19},
        ],
    ),
    # With adapters of the indexer, too.
    "glm5_next_text": (
        STATE_KINDS["glm5_next_text"] | {"mlp_layer_types": ["dense"] * 3},
        [{"modules": ("q_proj", "v_proj", "q_b_proj", "wq_b", "wk", "o_proj", *MLP), "seed": 18}],
    ),
    # Served with the modules of transformers.
    "opt": ({}, [{"modules": ("q_proj", "v_proj", "out_proj", "fc1", "fc2"), "seed": 6}]),
    "cohere2": ({"sliding_window": 11}, [{"modules": (*ATTENTION, *MLP, *VOCABULARY), "seed": 7}]),
}
# The kinds that one rank serves in `make test`; two ranks serve the others.
QUICK_ALONE = "llama", "qwen3_moe", "opt"

Adapted = tuple[Path, list[Path], list[Reference]]


@pytest.fixture(scope="module")
def adapted(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Adapted]:
    """`adapted(kind) -> model folder, adapter folders, references: of each merged model, and of the base`."""
    made: dict[str, Adapted] = {}

    def make(kind: str) -> Adapted:
        if kind not in made:
            overrides, adapters = KINDS[kind]
            model = make_model(kind.removesuffix("-stacked"), seed=7, **overrides)
            root = tmp_path_factory.mktemp(kind)
            paths = [
                write_adapter(root / f"adapter{index}", model, **settings)
                for index, settings in enumerate(adapters)
            ]
            merged = [merge(root / f"merged{index}", model, path) for index, path in enumerate(paths)]
            made[kind] = model, paths, [*(Reference(folder) for folder in merged), Reference(model)]
        return made[kind]

    return make


@pytest.mark.parametrize(
    ("kind", "tp"),
    [pytest.param(kind, 1, marks=() if kind in QUICK_ALONE else pytest.mark.slow) for kind in KINDS]
    + [(kind, 2) for kind in KINDS if kind != "opt"]
    + [("gpt_oss", 4)]
    + [pytest.param(kind, 4, marks=pytest.mark.slow) for kind in ("llama", "qwen3_moe", "qwen3_moe-stacked")],
)
def test_batch_of_adapters_equals_merged_models(
    kind: str, tp: int, adapted: Callable[[str], Adapted], make_engine: Any, planned: Any
) -> None:
    """Rows of every adapter and of none, in chunks, while others decode."""
    check_batch(adapted(kind), make_engine, planned, tp)


@pytest.mark.parametrize(("kind", "tp"), [("llama", 1), ("gemma2", 2), ("qwen3_moe", 1)])
def test_adapters_of_pipeline_stages_equal_merged_models(
    kind: str, tp: int, adapted: Callable[[str], Adapted], make_engine: Any, planned: Any
) -> None:
    """Each stage reads what an adapter has of its layers, of the embedding and of the head."""
    check_batch(adapted(kind), make_engine, planned, tp, pp=2)


def check_batch(adapted: Adapted, make_engine: Any, planned: Any, tp: int, **settings: Any) -> None:
    folder, paths, references = adapted
    engine = make_engine(folder, tp, block_size=8, max_num_seqs=5, lora=LORA, **settings)
    put_adapters(engine, paths)
    sequences, slots = [], [*range(len(paths)), NO_SLOT] * 2
    for index, (prompt, slot) in enumerate(zip(prompts_of([20] * len(slots), seed=1), slots, strict=True)):
        sequences.append(planned(prompt, 6 + 2 * index, GREEDY, arrival=index, lora_slot=slot))
    engine.generate(sequences, chunk_len=13)
    for sequence, slot in zip(sequences, slots, strict=True):
        references[slot].check_greedy(sequence.prompt, sequence.generated)
    assert references[0].generate(sequences[0].prompt, 6) != references[-1].generate(sequences[0].prompt, 6)


def test_slot_is_used_again_by_an_adapter_of_fewer_modules(
    adapted: Callable[[str], Adapted], make_engine: Any, planned: Any
) -> None:
    """Nothing of the slot's earlier adapter may be left."""
    folder, paths, references = adapted("llama")
    engine = make_engine(folder, 1, lora=LORA)
    put_adapters(engine, paths)
    engine.step(StepPlan(1, 1, 0, lora_slots=np.array([[0, 1]], np.int32)))
    (prompt,) = prompts_of([9], seed=3)
    sequence = planned(prompt, 8, GREEDY, lora_slot=0)
    engine.generate([sequence])
    references[1].check_greedy(prompt, sequence.generated)
    # A head that drafts shares the model's embedding, and computes other tokens between steps.
    assert engine.runners[0].memory.loaded.adapters.layers.step.is_empty


def test_failed_load_is_reported_and_leaves_the_rank_working(
    adapted: Callable[[str], Adapted], make_engine: Any, tmp_path: Path
) -> None:
    folder, _, references = adapted("llama")
    engine = make_engine(folder, 1, lora=LORA)
    adapters: RankAdapters = engine.runners[0].memory.loaded.adapters
    engine.runners[0].execute(load_plan(1, 0, []))
    adapters.store.load(LoraLoad(7, str(tmp_path / "missing")))
    assert adapters.store.take_reports(60) == (
        LoraReport(0, 7, error="ValueError: there is no such directory on this rank's node"),
    )
    (prompt,) = prompts_of([9], seed=3)
    (generated,) = engine.greedy([prompt], 4)
    references[-1].check_greedy(prompt, generated)


@pytest.mark.parametrize(
    ("kind", "target", "changed"),
    [
        # Decodes multiply it from both sides of cached latents, without an adapter of it.
        ("deepseek_v3", "kv_b_proj", "self_attn.kv_b_proj"),
        ("qwen4_exp_text", "key_proj", "ple.key_proj"),
        ("qwen4_exp_text", "input_mix_weight_up", "attn_hyper_connection.input_mix_weight_up"),
    ],
)
def test_adapter_of_layer_that_takes_none_is_refused_by_name(
    kind: str, target: str, changed: str, make_model: Any, make_engine: Any, tmp_path: Path
) -> None:
    folder = make_model(kind, seed=7, **STATE_KINDS.get(kind, {}))
    path = write_adapter(tmp_path / "adapter", folder, (target,))
    engine = make_engine(folder, 1, lora=LORA)
    store = engine.runners[0].memory.loaded.adapters.store
    store.load(LoraLoad(0, str(path)))
    (report,) = store.take_reports(60)
    assert f"model.layers.0.{changed}" in report.error


def test_dropped_adapter_is_not_reported(adapted: Callable[[str], Adapted], make_engine: Any) -> None:
    folder, paths, _ = adapted("llama")
    engine = make_engine(folder, 1, lora=LORA)
    put_adapters(engine, paths[:1])
    store = engine.runners[0].memory.loaded.adapters.store
    store.load(LoraLoad(5, str(paths[1])))
    store.drop(5)
    store.load(LoraLoad(6, str(paths[1])))
    while not (reports := store.take_reports(60)):
        pass  # the end of the dropped one wakes it as well
    assert [report.adapter_id for report in reports] == [6]
    engine.step(StepPlan(1, 1, 0, lora_drops=np.array([0, 6], np.int32)))
    assert len(store) == 0


def test_plan_with_adapters_survives_encoding() -> None:
    plan = StepPlan(
        3,
        1,
        7,
        lora_loads=(LoraLoad(4, "/adapters/é"),),
        lora_drops=np.array([1, 2], np.int32),
        lora_slots=np.array([[0, 3]], np.int32),
    )
    decoded = StepPlan.decode(plan.encode())
    assert decoded.lora_loads == plan.lora_loads
    assert decoded.lora_drops.tolist() == [1, 2]
    assert decoded.lora_slots.tolist() == [[0, 3]]
    empty = StepPlan.decode(StepPlan(3, 1, 7).encode())
    assert empty.lora_slots.shape == NO_PAIRS.shape
    assert (empty.lora_loads, empty.lora_drops.size) == ((), 0)


@pytest.mark.parametrize(("kind", "tp"), [("qwen3_moe", 2), ("qwen3_moe-stacked", 4), ("gpt_oss", 2)])
def test_ranks_of_whole_experts_equal_merged_models(
    kind: str, tp: int, adapted: Callable[[str], Adapted], make_engine: Any, planned: Any
) -> None:
    """With expert parallelism a rank has the adapters of its experts."""
    folder, paths, references = adapted(kind)
    engine = make_engine(folder, tp, max_num_seqs=5, lora=LORA, enable_expert_parallel=True)
    put_adapters(engine, paths)
    slots = [*range(len(paths)), NO_SLOT]
    sequences = [
        planned(prompt, 6, GREEDY, lora_slot=slot)
        for prompt, slot in zip(prompts_of([20] * len(slots), seed=1), slots, strict=True)
    ]
    engine.generate(sequences, chunk_len=13)
    for sequence, slot in zip(sequences, slots, strict=True):
        references[slot].check_greedy(sequence.prompt, sequence.generated)


def test_adapters_of_the_vocabulary_with_prefix_hits_and_preemptions(
    adapted: Callable[[str], Adapted], make_engine: Any
) -> None:
    """Log-probabilities of prompts, too, are those of the merged models."""
    folder, paths, references = adapted("llama")
    engine = make_engine(folder, 1, num_blocks=18, block_size=4, max_num_seqs=5, lora=LORA)
    driver = RankedDriver(engine.config.with_num_blocks(18), engine.step)
    adapters = [LoraReference(path.name, str(path)) for path in paths]
    prompts = prompts_of([14] * 3, seed=4)
    for first in (0, 10, 20):
        settings: dict[str, Any] = {"prompt_logprobs": 0} if first == 20 else {}
        for index, (prompt, lora) in enumerate(zip(prompts, adapters, strict=True)):
            driver.add(first + index, prompt, max_tokens=12, ignore_eos=True, lora=lora, **settings)
        driver.run()
    assert driver.scheduler.stats.num_preemptions > 0
    assert any(driver.finishes[10 + index].num_cached_tokens for index in range(3))
    for index, (prompt, reference) in enumerate(zip(prompts, references, strict=False)):
        expected, scores = log_softmax(reference, prompt), dict(driver.scores[20 + index])
        for first in (0, 10, 20):
            reference.check_greedy(prompt, driver.outputs[first + index])
        assert sorted(scores) == list(range(1, 14))
        for position, score in scores.items():
            assert score == pytest.approx(float(expected[position - 1, prompt[position]]), abs=1e-4)


@torch.inference_mode()
def log_softmax(reference: Reference, prompt: list[int]) -> torch.Tensor:
    logits: torch.Tensor = reference.model(torch.tensor([prompt])).logits[0]
    return logits.log_softmax(dim=-1)


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("llama", ("q_proj", "down_proj")), ("qwen3_moe", ("o_proj", "up_proj", "gate"))],
)
def test_slots_of_target_modules_alone(
    kind: str,
    targets: tuple[str, ...],
    make_model: Any,
    make_engine: Any,
    planned: Any,
    tmp_path: Path,
) -> None:
    """Layers of which adapters may change one part, or nothing, beside others in one native call."""
    folder = make_model(kind, seed=7, **KINDS[kind][0])
    path = write_adapter(tmp_path / "adapter", folder, targets, seed=3)
    reference = Reference(merge(tmp_path / "merged", folder, path))
    limited = make_engine(folder, 1, lora=replace(LORA, lora_target_modules=",".join(targets)))
    whole = make_engine(folder, 1, lora=LORA)
    slot_bytes = [engine.runners[0].memory.loaded.adapters.layers.slot_bytes for engine in (limited, whole)]
    assert 0 < slot_bytes[0] < 0.6 * slot_bytes[1]
    put_adapters(limited, [path])
    (prompt,) = prompts_of([20], seed=1)
    sequence = planned(prompt, 12, GREEDY, lora_slot=0)
    limited.generate([sequence])
    reference.check_greedy(prompt, sequence.generated)
