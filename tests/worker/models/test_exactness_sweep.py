"""Random models of every family, random ranks, blocks, chunks and batches: greedy tokens equal transformers'."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from reference import Reference, prompts_of

from quire.proto.step import RowSampling

NUM_CONFIGS = 200
GREEDY = RowSampling(temperature=0.0)
WINDOWED = ("mistral", "mixtral", "phi3", "gemma2", "gemma3_text", "olmo3", "cohere2", "starcoder2")
LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")
SPARSE = ("deepseek_v32", "glm_moe_dsa")
SHARDED = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe", "olmo2"),
    *(
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm_moe_dsa",
        "olmo3",
        "granite",
        "smollm3",
        "gpt_neox",
        "olmo",
        "gemma",
        "cohere2",
        "starcoder2",
    ),
)
ONE_RANK = ("gpt2", "opt", "bloom", "falcon")
# Served with transformers' modules: the number of ranks must divide the KV heads.
WITH_A_PLAN = ("gpt_neox", "olmo")


def draw_model(rng: random.Random) -> tuple[str, int, dict[str, Any]]:
    """Return a kind, a number of ranks, and overrides of its configuration."""
    kind = rng.choice(SHARDED + ONE_RANK)
    tp = rng.choice((1, 2, 4)) if kind in SHARDED else 1
    num_kv_heads = rng.choice((1, 2, 4, 8))
    num_heads = num_kv_heads * rng.choice((1, 2, 3)) * (4 if num_kv_heads < 4 else 1)
    head_dim = rng.choice((8, 16, 24))
    if kind in WITH_A_PLAN and num_kv_heads % tp:
        num_kv_heads = num_heads
    fields: dict[str, Any] = {
        "num_attention_heads": num_heads,
        "hidden_size": num_heads * head_dim,
        "num_hidden_layers": rng.randint(1, 4),
        "vocab_size": 384 + rng.randrange(8),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    if kind not in ("gpt2", "opt", "bloom", "falcon", "gpt_neox"):
        fields |= {"num_key_value_heads": num_kv_heads, "intermediate_size": rng.choice((96, 128, 130))}
    if kind not in ("gpt2", "opt", "bloom", "falcon", "gpt_neox", "phi3", "olmo", *LATENT):
        fields["head_dim"] = rng.choice((8, 16, 32))
    if kind in WITH_A_PLAN:
        fields["intermediate_size"] = 128
    if kind == "falcon":
        fields |= {"num_kv_heads": num_kv_heads, "alibi": False}
    if kind in LATENT:
        fields |= draw_latent(rng, kind) | {"num_key_value_heads": num_heads}
    return kind, tp, fields | draw_options(rng, kind, fields["hidden_size"])


def draw_latent(rng: random.Random, kind: str) -> dict[str, Any]:
    """Return overrides of latent attention and of group-limited routing."""
    num_groups, qk_rope_head_dim = rng.choice((1, 2, 4)), rng.choice((8, 16))
    fields: dict[str, Any] = {
        "kv_lora_rank": rng.choice((16, 40, 48)),
        "q_lora_rank": rng.choice((None, 24)),
        "qk_nope_head_dim": rng.choice((8, 16)),
        "qk_rope_head_dim": qk_rope_head_dim,
        "head_dim": qk_rope_head_dim,  # as transformers derives it
        "v_head_dim": rng.choice((8, 16)),
        "n_group": num_groups,
        "topk_group": rng.randint(1, num_groups),
        "num_experts_per_tok": 2,
        "first_k_dense_replace": rng.randint(0, 2),
        "n_shared_experts": rng.randint(1, 2),
    }
    if kind in SPARSE:
        fields |= {"q_lora_rank": 24, "index_topk": rng.choice((1, 7, 16, 64))}
        fields |= {"index_head_dim": qk_rope_head_dim + rng.choice((0, 8)), "indexer_types": None}
    if kind == "deepseek_v3":
        fields |= {"rope_interleave": rng.random() < 0.5, "norm_topk_prob": rng.random() < 0.5}
    return fields


def draw_options(rng: random.Random, kind: str, hidden_size: int) -> dict[str, Any]:
    """Return overrides of options that not every kind has."""
    fields: dict[str, Any] = {}
    if kind in WINDOWED and rng.random() < 0.7:
        fields["sliding_window"] = rng.randint(1, 40)
    if kind in ("llama", "qwen2", "qwen3") and rng.random() < 0.4:
        fields["rope_parameters"] = {"rope_type": "linear", "rope_theta": 1e4, "factor": rng.uniform(1, 4)}
    if kind in ("llama", "qwen3", "gemma2", "gemma3_text", "olmo2", "olmo3", "granite"):
        fields["attention_bias"] = rng.random() < 0.3
    if kind == "qwen3_moe":
        fields |= {"num_experts": rng.randint(2, 7), "num_experts_per_tok": rng.randint(1, 2)}
        fields |= {"norm_topk_prob": rng.random() < 0.5, "decoder_sparse_step": rng.randint(1, 2)}
    if kind == "opt":
        fields |= {"word_embed_proj_dim": hidden_size, "do_layer_norm_before": rng.random() < 0.8}
    if kind in ("mixtral", "qwen3_moe") and rng.random() < 0.5:
        fields["checkpoint"] = {"save_original_format": False}
    return fields


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_CONFIGS))
def test_random_model_equals_transformers(seed: int, make_model: Any, make_engine: Any, planned: Any) -> None:
    rng = random.Random(seed)
    kind, tp, fields = draw_model(rng)
    folder: Path = make_model(kind, seed=seed, **fields)
    reference = Reference(folder)
    sequences = [
        planned(prompt, rng.randint(1, 20), GREEDY, arrival=rng.randrange(6))
        for prompt in prompts_of([rng.randint(1, 70) for _ in range(rng.randint(1, 6))], seed=seed)
    ]
    settings = {"block_size": rng.choice((1, 4, 8, 16)), "max_num_seqs": rng.randint(1, 6)}
    engine = make_engine(folder, tp, num_blocks=600, **settings)
    engine.generate(sequences, chunk_len=rng.randint(1, 80), seed=seed)
    engine.close()
    for sequence in sequences:
        reference.check_greedy(sequence.prompt, sequence.generated)
