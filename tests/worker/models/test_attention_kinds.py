"""Five random models of each newer kind of attention, on 1, 2 and 4 ranks: tokens equal those of transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
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


# Model type |-> function that draws overrides of its configuration.
KINDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {"mimo_v2_flash": draw_mimo_v2_flash}


@pytest.mark.parametrize("seed", range(NUM_CONFIGS))
@pytest.mark.parametrize("kind", KINDS)
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
