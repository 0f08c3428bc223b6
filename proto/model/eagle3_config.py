"""Configuration of EAGLE-3 heads. Imports no torch."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..errors import ConfigError

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_NUM_AUX_LAYERS = 3
# Settings of the library speculators that belong to the head and not to its layer |-> their defaults.
_SPECULATORS_SETTINGS = {
    "draft_vocab_size": None,
    "norm_before_residual": True,
    "norm_before_fc": False,
    "eagle_aux_hidden_state_layer_ids": None,
}


def read_speculators(stored: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the configuration of a head that the library speculators has written, in the layout of others.

    Returns None if something else has written it.

    Args:
        stored: content of its config.json.

    Raises:
        ConfigError: it is not an EAGLE-3 head, or one with parts that are not supported.
    """
    layer = stored.get("transformer_layer_config")
    if not isinstance(layer, dict):
        return None
    for field, value, expected in (
        ("speculators_model_type", stored.get("speculators_model_type"), "eagle3"),
        ("transformer_layer_config.model_type", layer.get("model_type"), "llama"),
        ("norm_output", stored.get("norm_output", False), False),
        ("fc_norm", stored.get("fc_norm", False), False),
    ):
        if value != expected:
            raise ConfigError(
                f"speculative_config: model {name} has {field} {value!r}, must have {expected!r}"
            )
    settings = {field: stored.get(field, default) for field, default in _SPECULATORS_SETTINGS.items()}
    dtype = stored.get("dtype") or stored.get("torch_dtype") or layer.get("dtype") or layer.get("torch_dtype")
    return layer | settings | {"architectures": [ARCHITECTURES[0]], "dtype": dtype}


def aux_layers(head: ModelConfig, num_layers: int) -> frozenset[int]:
    """Return the layers of the target model whose inputs a head reads.

    Args:
        num_layers: number of the target model's layers.

    Raises:
        ConfigError: the configuration names no such layers; with few layers the published default does not exist.
    """
    given = _given_layers(head.hf)
    layers = (2, num_layers // 2, num_layers - 3) if given is None else given
    are_numbers = isinstance(layers, list | tuple) and all(type(layer) is int for layer in layers)
    if (
        not are_numbers
        or len({*layers}) != _NUM_AUX_LAYERS
        or not 0 <= min(layers) <= max(layers) <= num_layers
    ):
        raise ConfigError(
            f"speculative_config: model {head.name} reads the hidden states of layers {layers!r}, must be "
            f"{_NUM_AUX_LAYERS} different ones from 0 to {num_layers}; see eagle_aux_hidden_state_layer_ids in its "
            "config.json"
        )
    return frozenset(layers)


def _given_layers(hf: dict[str, Any]) -> Any:
    own = hf.get("eagle_config")
    nested = own.get("eagle_aux_hidden_state_layer_ids") if isinstance(own, dict) else None
    return hf.get("eagle_aux_hidden_state_layer_ids") if nested is None else nested
