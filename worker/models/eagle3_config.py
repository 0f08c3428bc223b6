"""Configuration of EAGLE-3 heads. Imports no torch."""

from __future__ import annotations

from typing import Any

from ...proto.config import ModelConfig
from ...proto.errors import ConfigError

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_NUM_AUX_LAYERS = 3


def aux_layers(head: ModelConfig, num_layers: int) -> frozenset[int]:
    """Return the layers of the target model whose inputs a head reads.

    Args:
        num_layers: of the target model.

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
