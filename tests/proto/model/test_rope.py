"""make_rope: frequencies equal transformers' for every rope type, and invalid settings raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.proto.model.rope import Rope, RopeContext, make_rope

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + index / 100 for index in range(64)],
    "long_factor": [1.0 + index / 10 for index in range(64)],
    "original_max_position_embeddings": 4096,
}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    # Of Llama 4 Scout.
    "llama3-unblended": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    "yarn-untruncated": {
        "rope_type": "yarn",
        "factor": 40.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "yarn-scaled": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 4096,
    },
    "longrope": LONGROPE,
    "longrope-scaled": LONGROPE | {"attention_factor": 1.19},
    "partial": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.25},
}


def context(max_model_len: int = 4096, **fields: Any) -> RopeContext:
    return RopeContext(head_dim=128, max_model_len=max_model_len, context_len=32768, **fields)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("max_model_len", [4096, 32768, 131072])
def test_frequencies_equal_transformers(name: str, max_model_len: int) -> None:
    settings = KINDS[name] | {"rope_theta": 5e5}
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=32768, rope_parameters=dict(settings)
    )
    kind = settings["rope_type"]
    expected, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=max_model_len)
    rope = make_rope(settings, context(max_model_len))
    torch.testing.assert_close(torch.tensor(rope.frequencies), expected)
    assert rope.scale == pytest.approx(scale)


def test_empty_settings_give_default_rope() -> None:
    assert make_rope({}, RopeContext(8, 64, 64)) == Rope((1.0, 0.1, 0.01, 0.001))
    assert make_rope({}, RopeContext(8, 64, 64, theta=16.0)) == Rope((1.0, 0.5, 0.25, 0.125))
    assert make_rope({}, RopeContext(8, 64, 64, partial_rotary_factor=0.5)) == Rope((1.0, 0.01))


def test_original_len_of_configuration_overrides_settings() -> None:
    """Phi-3 has original_max_position_embeddings outside of its rope settings."""
    assert make_rope(LONGROPE, context(8192, original_len=8192)).frequencies[1] == pytest.approx(
        10000 ** (-1 / 64) / 1.01
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rope_type": "spiral"}, "'spiral' is not supported; supported: default, linear"),
        ({"type": "linear"}, "'linear' lacks 'factor'"),
        ({"rope_type": "linear", "factor": 0}, "'linear' has invalid settings: .*zero"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "short_factor has 1 numbers for 64 pairs"),
        ({"rope_type": "yarn", "factor": "much"}, "'yarn' has invalid settings"),
        ({"partial_rotary_factor": 0.34}, "43 of 128 dimensions, must be even"),
        ({"partial_rotary_factor": 0.001}, "0 of 128 dimensions, must be even"),
        ({"partial_rotary_factor": 1.5}, "192 of 128 dimensions, must be even"),
        ({"partial_rotary_factor": [1]}, "'default' has invalid settings"),
        ({"rope_theta": "wide"}, "'default' has invalid settings"),
        (
            {"rope_theta": -1e30},
            "'default' has invalid settings: rope_theta is -1e.30, must be above 0 and finite",
        ),
        ({"rope_theta": float("nan")}, "rope_theta is nan, must be above 0 and finite"),
        ({"rope_type": ["yarn"]}, "is not supported; supported: default, linear"),
    ],
)
def test_invalid_settings_raise(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_rope(settings, context())


@pytest.mark.parametrize(("max_model_len", "scale"), [(4096, 1.24), (4097, 1.5)])
def test_longrope_has_a_scale_per_list(max_model_len: int, scale: float) -> None:
    context = RopeContext(128, max_model_len, 131072)
    settings = LONGROPE | {"short_mscale": 1.24, "long_mscale": 1.5}
    assert make_rope(settings, context).scale == scale
