"""Five random models of each newer kind of attention, on 1, 2 and 4 ranks: tokens equal those of transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from quantized_models import SCHEMES, write_quantized
from quick_cases import diagonal
from reference import Reference, prompts_of

from quire.proto.step import RowSampling

GREEDY = RowSampling(temperature=0.0)
NUM_CONFIGS = 5
RANKS = (1, 2, 4, 1, 2)


def draw_mimo_v2_flash(rng: random.Random) -> dict[str, Any]:
    """Return overrides with values of any length up to that of keys, and layers with windows of any length."""
    num_layers, head_dim, num_kv_heads = rng.randint(2, 4), rng.choice((16, 24, 40)), rng.choice((1, 2, 4))
    rotated = {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 8.1 / head_dim}
    return {
        "num_attention_heads": 2 * num_kv_heads * rng.choice((2, 4)),
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "v_head_dim": rng.randint(3, head_dim),
        "num_hidden_layers": num_layers,
        "layer_types": [rng.choice(("full_attention", "sliding_attention")) for _ in range(num_layers)],
        "mlp_layer_types": [rng.choice(("dense", "sparse")) for _ in range(num_layers)],
        "rope_parameters": {"full_attention": rotated, "sliding_attention": rotated | {"rope_theta": 1e2}},
        "attention_value_scale": rng.choice((None, 0.5, 0.707)),
        "sliding_window": rng.randint(1, 40),
    }


def draw_latent(rng: random.Random) -> dict[str, Any]:
    """Return overrides of latent attention."""
    num_heads, qk_rope_head_dim = rng.choice((4, 8, 12)), rng.choice((8, 16))
    return {
        "hidden_size": num_heads * rng.choice((6, 8)),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "num_hidden_layers": rng.randint(2, 4),
        "kv_lora_rank": rng.choice((16, 40, 48)),
        "q_lora_rank": rng.choice((20, 24)),
        "qk_nope_head_dim": rng.choice((8, 12, 16)),
        "qk_rope_head_dim": qk_rope_head_dim,
        "head_dim": qk_rope_head_dim,  # as transformers derives it
        "v_head_dim": rng.choice((6, 8, 16)),
    }


def draw_mixture(rng: random.Random) -> dict[str, Any]:
    """Return overrides of latent attention and of group-limited routing; some layers are dense."""
    num_groups, latent = rng.choice((1, 2, 4)), draw_latent(rng)
    return latent | {
        "n_group": num_groups,
        "topk_group": rng.randint(1, num_groups),
        "num_experts_per_tok": 2,
        "n_shared_experts": rng.randint(1, 2),
        "mlp_layer_types": [rng.choice(("dense", "sparse")) for _ in range(latent["num_hidden_layers"])],
    }


def draw_mistral4(rng: random.Random) -> dict[str, Any]:
    """Return overrides with queries whose temperature changes early."""
    fields = draw_mixture(rng) | {"first_k_dense_replace": rng.randint(0, 2)}
    del fields["mlp_layer_types"]
    fields["head_dim"] = fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    rope |= {
        "original_max_position_embeddings": rng.choice((8, 32)),
        "llama_4_scaling_beta": rng.choice((0.1, 0.5)),
    }
    return fields | {"rope_parameters": rope, "rope_interleave": rng.random() < 0.5}


def draw_minicpm3(rng: random.Random) -> dict[str, Any]:
    """Return overrides with scales of embeddings, residual and logits."""
    scales = {"scale_emb": rng.choice((1, 6)), "scale_depth": rng.choice((0.7, 1.4)), "dim_model_base": 256}
    return draw_latent(rng) | scales | {"q_lora_rank": rng.choice((None, 24))}


def draw_axk2(rng: random.Random) -> dict[str, Any]:
    """Return overrides with gates of norms and values, and indexers."""
    fields = draw_mixture(rng) | {
        "gated_norm_rank": rng.randint(3, 8),
        "index_topk": rng.choice((1, 7, 16, 64)),
    }
    return fields | {"index_head_dim": fields["qk_rope_head_dim"] + rng.choice((0, 8))}


def draw_gemma4_unified(rng: random.Random) -> dict[str, Any]:
    """Return overrides with heads of two sizes, and layers that share keys and values."""
    return {
        "head_dim": rng.choice((8, 16)),
        "global_head_dim": rng.choice((16, 32)),
        "num_global_key_value_heads": rng.choice((1, 2, 4)),
        "num_kv_shared_layers": rng.choice((0, 2)),
        "attention_k_eq_v": rng.random() < 0.5,
        "sliding_window": rng.randint(1, 40),
    }


def draw_longcat_flash(rng: random.Random) -> dict[str, Any]:
    """Return overrides with any number of pairs of layers, experts, and experts that compute nothing."""
    fields = draw_latent(rng) | {"num_layers": rng.randint(1, 3), "n_routed_experts": rng.randint(4, 7)}
    del fields["num_hidden_layers"]
    return fields | {"zero_expert_num": rng.randint(0, 4), "moe_topk": rng.randint(2, 4)}


def draw_hy_v4(rng: random.Random) -> dict[str, Any]:
    """Return overrides with any number of streams, and indexers that some layers share."""
    fields = draw_mixture(rng) | {"hc_mult": rng.randint(1, 4), "hc_magnitude": rng.choice((1.0, 2.0))}
    kinds = ["full", *(rng.choice(("full", "shared")) for _ in range(fields["num_hidden_layers"] - 1))]
    fields |= {"indexer_types": kinds, "index_topk": rng.choice((1, 7, 16, 64))}
    return fields | {
        "index_head_dim": fields["qk_rope_head_dim"] + rng.choice((0, 8)),
        "swiglu_limit": rng.choice((0.3, 7.0)),
    }


# Model type |-> function that draws overrides of its configuration.
KINDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "mimo_v2_flash": draw_mimo_v2_flash,
    "mistral4": draw_mistral4,
    "minicpm3": draw_minicpm3,
    "axk1": draw_mixture,
    "axk2": draw_axk2,
    "longcat_flash": draw_longcat_flash,
    "gemma4_unified_text": draw_gemma4_unified,
    "hy_v4": draw_hy_v4,
}


@pytest.mark.parametrize(("kind", "seed"), diagonal(KINDS, range(NUM_CONFIGS)))
def test_random_attention_equals_transformers(
    kind: str, seed: int, make_model: Any, make_engine: Any, planned: Any
) -> None:
    rng = random.Random(f"{kind} {seed}")
    usual = {"hidden_size": rng.choice((48, 64, 72)), "vocab_size": 384 + rng.randrange(8)}
    folder = make_model(kind, seed=seed, **(usual | KINDS[kind](rng)))
    reference = Reference(folder)
    sequences = [
        planned(prompt, rng.randint(4, 20), GREEDY, arrival=rng.randrange(6))
        for prompt in prompts_of([rng.randint(1, 70) for _ in range(4)], seed=seed)
    ]
    settings = {"block_size": rng.choice((1, 4, 8, 16)), "max_num_seqs": rng.randint(1, 6)}
    engine = make_engine(folder, RANKS[seed], num_blocks=600, **settings)
    engine.generate(sequences, chunk_len=rng.randint(1, 80), seed=seed)
    engine.close()
    for sequence in sequences:
        reference.check_greedy(sequence.prompt, sequence.generated)


@pytest.mark.parametrize(
    ("kind", "scheme", "tp"),
    [
        ("mimo_v2_flash", "float8", 2),
        ("mistral4", "int8", 2),
        ("axk2", "int8", 2),
        ("longcat_flash", "int8", 4),
        ("hy_v4", "int8", 2),
        ("gemma4_unified_text", "packed-symmetric", 1),
    ],
)
def test_quantized_checkpoint_gives_tokens_of_dequantized_weights(
    kind: str, scheme: str, tp: int, make_model: Any, make_engine: Any, tmp_path: Path
) -> None:
    whole = replace(SCHEMES[scheme], ignored="weights_proj|_layernorm")  # as published checkpoints have them
    quantized, twin = write_quantized(make_model(kind, seed=7), tmp_path, whole)
    prompts = prompts_of([5, 40], seed=3)
    found, expected = (
        make_engine(folder, tp).greedy(prompts, 10, chunk_len=16) for folder in (quantized, twin)
    )
    assert found == expected


@pytest.mark.parametrize("kind", ["mistral4", "axk2", "longcat_flash"])
def test_ranks_that_attend_for_their_own_sequences_equal_transformers(
    kind: str, make_model: Any, make_engine: Any, planned: Any
) -> None:
    folder = make_model(kind, seed=7)
    engine = make_engine(folder, 2, num_blocks=200, block_size=8, enable_dp_attention=True)
    reference = Reference(folder)
    for prompt in prompts_of([3, 40], seed=2):
        (generated,) = engine.greedy([prompt], 12, chunk_len=16)
        reference.check_greedy(prompt, generated)
