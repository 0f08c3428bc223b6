"""Ranks that hold whole experts generate the tokens of transformers, and read their own experts only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import Scheme, write_quantized
from quick_cases import slow_except
from reference import Reference, prompts_of

from quire.cluster.config.model_config import describe_model
from quire.kernels.packed_experts import PackedExperts
from quire.proto.errors import ConfigError
from quire.proto.model.registry import check_supported
from quire.proto.model.spec import DecoderSpec
from quire.proto.step import RowSampling
from quire.worker.comm.communicator import Communicator
from quire.worker.models.llama.decoder import Decoder
from quire.worker.models.load_context import LoadContext
from quire.worker.models.moe.expert_layers import ExpertLayers
from quire.worker.models.moe.moe import MixtureOfExperts
from quire.worker.weights.checkpoint import Checkpoint

GREEDY = RowSampling(temperature=0.0)
# Kind, ranks, and overrides. The ranks hold different numbers of experts where 4 does not divide them.
MODELS: list[tuple[str, int, dict[str, Any]]] = [
    ("mixtral", 4, {}),
    ("qwen3_moe", 4, {"mlp_only_layers": [1], "norm_topk_prob": True}),
    ("qwen3_moe", 2, {"checkpoint": {"save_original_format": False}}),
    ("deepseek_v3", 4, {}),
    ("glm4_moe", 2, {"attention_bias": True}),
    ("gpt_oss", 4, {}),
    ("minimax_m2", 4, {}),
    ("llama4_text", 2, {}),
    ("longcat_flash", 4, {}),
    (
        "gemma4_text",
        2,
        {
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
]


@pytest.mark.parametrize(("kind", "tp", "fields"), MODELS, ids=lambda value: str(value)[:20])
def test_experts_of_ranks_give_tokens_of_transformers(
    kind: str, tp: int, fields: dict[str, Any], make_model: Any, make_engine: Any, planned: Any
) -> None:
    folder = make_model(kind, seed=7, **fields)
    reference = Reference(folder)
    sequences = [planned(prompt, 8, GREEDY) for prompt in prompts_of([5, 23], seed=1)]
    make_engine(folder, tp, enable_expert_parallel=True).generate(sequences, chunk_len=16)
    for sequence in sequences:
        reference.check_greedy(sequence.prompt, sequence.generated)


# Kind, ranks, whether each rank attends for its own tokens, and overrides.
TRAVELS: list[tuple[str, int, bool, dict[str, Any]]] = [
    ("deepseek_v3", 2, True, {}),
    ("deepseek_v3", 4, True, {}),
    ("qwen3_moe", 2, False, {"mlp_only_layers": [1], "norm_topk_prob": True}),
    ("qwen3_moe", 4, False, {}),
    ("gpt_oss", 4, False, {}),
    ("deepseek_v3", 4, False, {}),
    ("llama4_text", 2, False, {}),
    ("glm4_moe", 2, False, {"attention_bias": True}),
]


@pytest.mark.parametrize(
    ("kind", "tp", "is_dp", "fields", "num_redundant"),
    slow_except(
        [(*split, 3 * (index % 2)) for index, split in enumerate(TRAVELS)],
        [(*split, num_redundant) for split in TRAVELS for num_redundant in (0, 3)],
    ),
    ids=lambda value: str(value)[:20],
)
def test_tokens_that_travel_to_experts_are_those_of_transformers(
    kind: str,
    tp: int,
    is_dp: bool,
    fields: dict[str, Any],
    num_redundant: int,
    make_model: Any,
    make_engine: Any,
) -> None:
    folder = make_model(kind, seed=7, **fields)
    engine = make_engine(
        folder,
        tp,
        enable_expert_parallel=True,
        all2all_backend="all_to_all",
        enable_dp_attention=is_dp,
        num_redundant_experts=num_redundant,
    )
    prompts = prompts_of([5, 23, 1], seed=1)
    for prompt, generated in zip(prompts, engine.greedy(prompts, 8, chunk_len=16), strict=True):
        Reference(folder).check_greedy(prompt, generated)


SCHEMES = {
    # A part of 12 of the 48 numbers of an expert would begin inside a word of 8.
    "awq": Scheme("awq", group_len=16, ignored=r"mlp\.gate\.|lm_head|embed"),
    "float8-blocks": Scheme("float8", is_float=True, block=(32, 32), ignored=r"mlp\.gate\.|lm_head|embed"),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_quantized_experts_give_tokens_of_dequantized_weights(
    name: str, make_model: Any, make_engine: Any, tmp_path: Path
) -> None:
    quantized, twin = write_quantized(make_model("qwen3_moe", seed=7), tmp_path, SCHEMES[name])
    (prompt,) = prompts_of([9], seed=1)
    (generated,) = make_engine(quantized, 4, enable_expert_parallel=True).greedy([prompt], 8)
    Reference(twin).check_greedy(prompt, generated)
    if name == "awq":
        with pytest.raises(ConfigError, match="not aligned to words of 8 numbers"):
            make_engine(quantized, 4)


def test_rank_holds_its_experts_only(make_model: Any, make_engine: Any) -> None:
    folder = make_model("qwen3_moe", seed=7)
    engine = make_engine(folder, 4, enable_expert_parallel=True)
    for rank, expected in enumerate([range(2), range(2, 4), range(4, 5), range(5, 6)]):
        layer = engine.runners[rank].memory.loaded.model.layers[0].mlp
        assert isinstance(layer, MixtureOfExperts)
        experts = layer.experts
        if isinstance(experts, PackedExperts):
            assert (experts.first, experts.count) == (expected.start, len(expected))
        else:  # there is no C++ compiler
            assert isinstance(experts, ExpertLayers)
            assert (experts.first_expert, len(experts.down)) == (expected.start, len(expected))


def bytes_read(folder: Path, comm: Communicator) -> int:
    """Load a rank's part of a model with whole experts; return the bytes that it read."""
    checkpoint = Checkpoint(folder)
    load = LoadContext(checkpoint, comm, torch.float32, torch.device("cpu"), expert_parallel=True)
    spec = check_supported(describe_model(folder, "it"), comm.size, expert_parallel=True)
    assert isinstance(spec, DecoderSpec)
    Decoder(load, spec, num_positions=64)
    checkpoint.close()
    return checkpoint.num_bytes_read


def test_rank_reads_its_experts_only(make_model: Any, thread_group: Any) -> None:
    """Ranks 0 and 2 of 4 have equal parts of everything else, but two experts and one."""
    group = thread_group(4)
    for layout in ({}, {"checkpoint": {"save_original_format": False}}):
        folder = make_model("qwen3_moe", seed=7, **layout)
        first, third = (bytes_read(folder, group.communicator(rank)) for rank in (0, 2))
        one_expert, num_layers = 3 * 48 * 64 * 4, 3
        assert first - third == num_layers * one_expert


def test_fewer_experts_than_ranks_raise(make_model: Any, engine_config: Any) -> None:
    model = engine_config(make_model("mixtral", seed=7, num_local_experts=3)).model
    check_supported(model, 4)
    with pytest.raises(ConfigError, match="3 experts, too few for one on each of 4 ranks"):
        check_supported(model, 4, expert_parallel=True)


def test_more_ranks_than_numbers_of_an_expert_are_supported(
    make_model: Any, engine_config: Any, tmp_path: Path
) -> None:
    shutil.copytree(make_model("qwen3_moe", seed=7), tmp_path / "narrow")
    path = tmp_path / "narrow" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"moe_intermediate_size": 2}))
    model = engine_config(tmp_path / "narrow").model
    check_supported(model, 4, expert_parallel=True)
    with pytest.raises(ConfigError, match="intermediate size of experts, 2, is too small"):
        check_supported(model, 4)
