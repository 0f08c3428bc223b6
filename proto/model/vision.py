"""The VisionSpec of an architecture, read from a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError
from ..vision import VisionSpec


def _read_qwen2_5_vl(name: str, hf: Mapping[str, Any]) -> VisionSpec:
    vision, size, inner = hf["vision_config"], *_sizes(hf)
    layer = (
        _linear(size, 3 * size)
        + _linear(size, size)
        + 2 * size
        + 2 * _linear(size, inner)
        + _linear(inner, size)
    )
    num_parameters = _patch_len(vision) * size + int(vision["depth"]) * layer + _merger(hf, size)
    return _qwen_spec("qwen2_5_vl", hf, num_parameters)


def _qwen_spec(kind: str, hf: Mapping[str, Any], num_parameters: int) -> VisionSpec:
    vision = hf["vision_config"]
    return VisionSpec(
        kind,
        image_token_id=int(hf["image_token_id"]),
        embedding_size=int(hf["text_config"]["hidden_size"]),
        merge_size=int(vision["spatial_merge_size"]),
        has_grid_positions=True,
        num_deep_features=len(vision.get("deepstack_visual_indexes") or ()),
        num_parameters=num_parameters,
        hf=vision,
    )


def _sizes(hf: Mapping[str, Any]) -> tuple[int, int]:
    return int(hf["vision_config"]["hidden_size"]), int(hf["vision_config"]["intermediate_size"])


def _patch_len(vision: Mapping[str, Any]) -> int:
    return int(vision["in_channels"]) * int(vision["temporal_patch_size"]) * int(vision["patch_size"]) ** 2


def _linear(in_features: int, out_features: int) -> int:
    """Return the parameters of a linear layer with a bias."""
    return (in_features + 1) * out_features


def _merger(hf: Mapping[str, Any], norm_len: int) -> int:
    """Return the parameters of the layers that merge patches, with a norm's weight."""
    vision = hf["vision_config"]
    merged = int(vision["hidden_size"]) * int(vision["spatial_merge_size"]) ** 2
    return norm_len + _linear(merged, merged) + _linear(merged, int(hf["text_config"]["hidden_size"]))


def _read_qwen3_vl(name: str, hf: Mapping[str, Any]) -> VisionSpec:
    """Return the encoder of Qwen3-VL and Qwen3.5; the latter has no deep features."""
    vision = hf["vision_config"]
    if (activation := vision.get("hidden_act")) != "gelu_pytorch_tanh":
        raise ValueError(f"its activation {activation!r:.100} is not supported")
    size, inner = _sizes(hf)
    layer = (
        _linear(size, 3 * size) + _linear(size, size) + _linear(size, inner) + _linear(inner, size) + 4 * size
    )
    num_deep = len(vision.get("deepstack_visual_indexes") or ())
    merged = size * int(vision["spatial_merge_size"]) ** 2
    num_parameters = (
        _linear(_patch_len(vision), size)
        + int(vision["num_position_embeddings"]) * size
        + int(vision["depth"]) * layer
        + _merger(hf, 2 * size)
        + num_deep * _merger(hf, 2 * merged)
    )
    return _qwen_spec("qwen3_vl", hf, num_parameters)


def _read_mistral3(name: str, hf: Mapping[str, Any]) -> VisionSpec:
    vision, (size, inner) = hf["vision_config"], _sizes(hf)
    if vision["model_type"] != "pixtral" or hf.get("vision_feature_layer", -1) != -1:
        raise ValueError(
            f"an encoder of type {vision['model_type']!r:.100} and its layer {hf.get('vision_feature_layer')!r:.100} "
            "are not supported, only the last layer of a pixtral"
        )
    embedding_size, merge_size = int(hf["text_config"]["hidden_size"]), int(hf["spatial_merge_size"])
    bias = bool(hf["multimodal_projector_bias"])
    layer = 4 * size * size + 3 * size * inner + 2 * size
    projector = size * merge_size**2 * size + size + (size + embedding_size + 2 * bias) * embedding_size
    patch_len = int(vision["num_channels"]) * int(vision["patch_size"]) ** 2
    return VisionSpec(
        "pixtral",
        image_token_id=int(hf["image_token_id"] if "image_token_id" in hf else hf["image_token_index"]),
        embedding_size=embedding_size,
        merge_size=merge_size,
        num_parameters=(patch_len + 1) * size + int(vision["num_hidden_layers"]) * layer + projector,
        hf=dict(vision)
        | {
            "projector_norm_eps": hf["text_config"]["rms_norm_eps"],
            "projector_bias": bias,
            "projector_hidden_act": hf["projector_hidden_act"],
        },
    )


# Architecture |-> function that reads the spec of its encoder from the name and the whole configuration of a model.
VISION_READERS: dict[str, Callable[[str, Mapping[str, Any]], VisionSpec]] = {
    "Qwen2_5_VLForConditionalGeneration": _read_qwen2_5_vl,
    "Mistral3ForConditionalGeneration": _read_mistral3,
    "Qwen3VLForConditionalGeneration": _read_qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": _read_qwen3_vl,
    "Qwen3_5ForConditionalGeneration": _read_qwen3_vl,
    "Qwen3_5MoeForConditionalGeneration": _read_qwen3_vl,
}


def read_vision(name: str, architecture: str, hf: Mapping[str, Any]) -> VisionSpec | None:
    """Return the encoder of a model; None for one that is served with text alone.

    Args:
        hf: the whole configuration, with those of the parts.

    Raises:
        ConfigError: the configuration lacks a setting, or has one that is not supported.
    """
    reader = VISION_READERS.get(architecture)
    if reader is None:
        return None
    try:
        return reader(name, hf)
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{name}: the configuration of its image encoder cannot be read: {error!r}"
        ) from error
