"""Greedy tokens equal transformers' for any number of ranks and any batches, chunks and blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference import Reference, prompts_of

from quire.proto.step import RowSampling

GREEDY = RowSampling(temperature=0.0)

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-two-kv-heads": {"num_key_value_heads": 2, "intermediate_size": 130},
    "llama-tied-biased": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 8,
    },
    "llama-rope-llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama-rope-linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "llama-rope-yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "llama-rope-dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}},
    "mistral": {},
    "mistral-window": {"sliding_window": 11},
    "ministral": {
        "sliding_window": 11,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mixtral": {"sliding_window": 24},
    "mixtral-fused": {"checkpoint": {"save_original_format": False}},
    "gpt_oss": {},
    "qwen2": {},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    "qwen3": {},
    "qwen3-odd-vocabulary": {"vocab_size": 387, "num_key_value_heads": 8},
    "qwen3_moe": {"mlp_only_layers": [1], "norm_topk_prob": True},
    "qwen3_moe-fused": {"decoder_sparse_step": 2, "checkpoint": {"save_original_format": False}},
    "gemma2": {},
    "gemma3_text": {},
    "phi3": {"num_key_value_heads": 8},
    "phi3-longrope": {
        "sliding_window": 24,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.5],
            "long_factor": [1.0, 4.0],
        },
        "original_max_position_embeddings": 256,
    },
    "olmo2": {"attention_bias": True},
    "olmo3": {"sliding_window": 24},
    "granite": {},
    "deepseek_v2": {},
    "deepseek_v2-yarn": {
        "topk_method": "greedy",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 32,
        },
    },
    "deepseek_v3": {},
    "deepseek_v3-fused": {"n_group": 1, "topk_group": 1, "checkpoint": {"save_original_format": False}},
    "deepseek_v3-halves": {"rope_interleave": False, "q_lora_rank": None},
    "smollm3": {"no_rope_layer_interval": 2},
    "glm": {},
    "glm4": {"attention_bias": True},
    "glm4_moe": {"attention_bias": True},
    "minimax_m2": {},
    "exaone4": {},
    "exaone4-full": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    "ernie4_5": {},
    "ernie4_5-biased": {"use_bias": True},
    "ernie4_5_moe": {"use_bias": False},
    "olmoe": {"norm_topk_prob": True},
    "seed_oss": {"attention_bias": True},
    "hunyuan_v1_dense": {},
    "cohere2": {"sliding_window": 11},
    "cohere": {},
    "cohere-norms": {"use_qk_norm": True},
    "nemotron": {},
    "starcoder2": {},
    "stablelm": {"use_qkv_bias": True},
    "stablelm-parallel": {"use_parallel_residual": True, "qk_layernorm": True},
    # Served with the modules of transformers.
    "gpt2": {},
    "gpt_neox": {},
    "opt": {},
    "bloom": {},
    "falcon": {},
    "falcon-multi-query": {"new_decoder_architecture": False, "multi_query": True},
    "falcon-linear-biases": {
        "new_decoder_architecture": False,
        "multi_query": False,
        "num_kv_heads": 8,
        "alibi": True,
    },
    "olmo": {},
    "gemma": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe-fused": {"num_local_experts": 4, "checkpoint": {"save_original_format": False}},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64},
}
# No tensor-parallel plan, or one with styles besides columns and rows.
ONE_RANK_ONLY = {
    "gpt2",
    "opt",
    "bloom",
    "falcon",
    "falcon-multi-query",
    "falcon-linear-biases",
    "phimoe",
    "phimoe-fused",
}

References = Callable[[str], tuple[Path, Reference]]


@pytest.fixture(scope="module")
def references(make_model: Any) -> References:
    """`references(kind) -> folder, Reference`, for a kind of KINDS; cached."""
    made: dict[str, tuple[Path, Reference]] = {}

    def reference(kind: str) -> tuple[Path, Reference]:
        if kind not in made:
            folder = make_model(kind.split("-")[0], seed=7, **KINDS[kind])
            made[kind] = folder, Reference(folder)
        return made[kind]

    return reference


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_single_request_equals_transformers(
    tp: int, references: References, make_engine: Any, planned: Any
) -> None:
    folder, reference = references("llama")
    engine = make_engine(folder, tp)
    for prompt in prompts_of([5, 33], seed=6):
        sequence = planned(prompt, 20, GREEDY)
        engine.generate([sequence], chunk_len=16)
        reference.check_generate(prompt, sequence.generated)


def ranks_for(kind: str) -> tuple[int, ...]:
    """Return 1, 2 and 4 ranks for a family, and fewer for its variants."""
    if kind in ONE_RANK_ONLY or "-rope-" in kind:
        return (1,)
    return (4,) if "-" in kind else (1, 2, 4)


@pytest.mark.parametrize(("kind", "tp"), [(kind, tp) for kind in KINDS for tp in ranks_for(kind)])
def test_mixed_batch_equals_transformers(
    kind: str, tp: int, references: References, make_engine: Any, planned: Any
) -> None:
    folder, reference = references(kind)
    engine = make_engine(folder, tp, block_size=8, max_num_seqs=4)
    # Lengths around multiples of block and chunk size; more sequences than rows; arrivals while others decode.
    lengths = [1, 8, 9, 20, 41, 60]
    sequences = [
        planned(prompt, 8 + 3 * index, GREEDY, arrival=index)
        for index, prompt in enumerate(prompts_of(lengths, seed=1))
    ]
    engine.generate(sequences, chunk_len=20)
    generated = {token_id for sequence in sequences for token_id in sequence.generated}
    assert len(generated) > 10, "the output of the model is too repetitive for this test"
    for sequence in sequences:
        reference.check_greedy(sequence.prompt, sequence.generated)


def test_sequence_beyond_original_context_equals_transformers(
    references: References, make_engine: Any, planned: Any
) -> None:
    """With LongRoPE it has the factors of the long list from its first token on."""
    folder, reference = references("phi3-longrope")
    engine = make_engine(folder, 1, max_model_len=320)
    (prompt,) = prompts_of([270], seed=5)
    sequence = planned(prompt, 10, GREEDY)
    engine.generate([sequence], chunk_len=100)
    reference.check_greedy(prompt, sequence.generated)


@pytest.mark.parametrize("rope_type", ["linear", "dynamic"])
def test_sequence_of_the_extended_context_equals_transformers(
    rope_type: str, make_model: Any, make_engine: Any, planned: Any
) -> None:
    """The base of `dynamic` is that of transformers for a sequence of max_model_len tokens."""
    rope = {"rope_type": rope_type, "rope_theta": 500.0, "factor": 4.0}
    folder = make_model("llama", seed=7, max_position_embeddings=48, rope_parameters=rope)
    engine = make_engine(folder, 1, max_model_len=160)
    (prompt,) = prompts_of([150], seed=5)
    sequence = planned(prompt, 10, GREEDY)
    engine.generate([sequence], chunk_len=40)
    Reference(folder).check_greedy(prompt, sequence.generated)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mixtral", "opt", "bloom"])
def test_any_chunk_length_gives_same_tokens(
    kind: str, references: References, make_engine: Any, planned: Any
) -> None:
    folder, reference = references(kind)
    engine = make_engine(folder, 1, block_size=4)
    (prompt,) = prompts_of([27 if kind == "gemma3_text" else 13], seed=4)  # longer than its window
    for chunk_len in range(1, len(prompt) + 1):
        sequence = planned(prompt, 5, GREEDY)
        engine.generate([sequence], chunk_len=chunk_len, seed=chunk_len)
        reference.check_greedy(prompt, sequence.generated)


@pytest.fixture(scope="module")
def demo_reference(demo_model_dir: Path) -> Reference:
    return Reference(demo_model_dir)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_single_request_of_demo_model_equals_transformers(
    demo_model_dir: Path, demo_reference: Reference, tp: int, make_engine: Any, planned: Any
) -> None:
    engine = make_engine(demo_model_dir, tp)
    for prompt in prompts_of([3, 16, 40], seed=2):
        sequence = planned(prompt, 24, GREEDY)
        engine.generate([sequence], chunk_len=16)
        demo_reference.check_generate(sequence.prompt, sequence.generated)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_mixed_batch_of_demo_model_equals_transformers(
    demo_model_dir: Path, demo_reference: Reference, tp: int, make_engine: Any, planned: Any
) -> None:
    engine = make_engine(demo_model_dir, tp, max_num_seqs=8)
    sequences = [planned(prompt, 20, GREEDY) for prompt in prompts_of([2, 15, 16, 17, 33, 50], seed=3)]
    engine.generate(sequences, chunk_len=17)
    for sequence in sequences:
        demo_reference.check_generate(sequence.prompt, sequence.generated)
