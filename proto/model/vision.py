"""The VisionSpec of an architecture, read from a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ConfigError
from ..vision import EncoderLayers, VisionSpec

_NO_BIASES = {"qkv_bias": False, "output_bias": False, "mlp_bias": False}


def _read_qwen2_5_vl(name: str, hf: Mapping[str, Any]) -> VisionSpec:
    vision, size = hf["vision_config"], _size(hf)
    layers = _layers(vision, num_inward=2, num_others=2 * size)
    spec = _qwen_spec("qwen2_5_vl", hf, layers, _patch_len(vision) * size + _merger(hf, size))
    return replace(
        spec, video_token_id=_video_token_id(hf), tokens_per_second=float(vision.get("tokens_per_second", 4))
    )


def _video_token_id(hf: Mapping[str, Any]) -> int | None:
    token_id = hf.get("video_token_id")
    return None if token_id is None else int(token_id)


def _qwen_spec(kind: str, hf: Mapping[str, Any], layers: EncoderLayers, num_others: int) -> VisionSpec:
    """Return a spec, given the parameters beside those of the layers."""
    vision = hf["vision_config"]
    return VisionSpec(
        kind,
        image_token_id=int(hf["image_token_id"]),
        embedding_size=int(hf["text_config"]["hidden_size"]),
        merge_size=int(vision["spatial_merge_size"]),
        has_grid_positions=True,
        num_deep_features=len(vision.get("deepstack_visual_indexes") or ()),
        layers=(layers,),
        num_parameters=layers.num_parameters() + num_others,
        hf=vision,
    )


def _size(hf: Mapping[str, Any]) -> int:
    return int(hf["vision_config"]["hidden_size"])


def _layers(vision: Mapping[str, Any], **form: Any) -> EncoderLayers:
    """Return the layers of an encoder by the names that most configurations have, with norms that have biases.

    Args:
        form: settings of EncoderLayers that differ from these.
    """
    size = int(vision["hidden_size"])
    num_layers = next(
        vision[key] for key in ("num_used_layers", "depth", "num_hidden_layers") if key in vision
    )
    found: dict[str, Any] = {
        "count": int(num_layers),
        "size": size,
        "inner": int(vision.get("intermediate_size", 0)),
        "num_heads": int(vision["num_heads" if "num_heads" in vision else "num_attention_heads"]),
        "num_others": 4 * size,
    }
    return EncoderLayers(**found | form)


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
    size = _size(hf)
    num_deep = len(vision.get("deepstack_visual_indexes") or ())
    merged = size * int(vision["spatial_merge_size"]) ** 2
    num_others = (
        _linear(_patch_len(vision), size)
        + int(vision["num_position_embeddings"]) * size
        + _merger(hf, 2 * size)
        + num_deep * _merger(hf, 2 * merged)
    )
    spec = _qwen_spec("qwen3_vl", hf, _layers(vision), num_others)
    return replace(spec, video_token_id=_video_token_id(hf))


def _read_glm4v(name: str, hf: Mapping[str, Any]) -> VisionSpec:
    """Return the encoder of GLM-4V, or of GLM-OCR and GLM-5 Next: without learned positions, with norms of heads."""
    vision, size, inner = hf["vision_config"], _size(hf), int(hf["vision_config"]["intermediate_size"])
    is_next = vision["model_type"] == "glm5_next_vision"
    is_ocr, bias = is_next or vision["model_type"] == "glm_ocr_vision", bool(vision["attention_bias"])
    merged, side = int(vision["out_hidden_size"]), int(vision["spatial_merge_size"])
    if merged != int(hf["text_config"]["hidden_size"]):
        raise ValueError(f"its out_hidden_size is {merged}, not the hidden size of the text model")
    layer_inner, merger_inner = (inner, merged * int(vision["in_channels"])) if is_ocr else (merged, inner)
    clamp: tuple[float, float, float] | None = None
    if is_next:
        merger_inner = int(vision["projection_intermediate_size"])
        clamp = 1.0, float(vision["swiglu_limit"]), 0.0
        if vision["hidden_act"] != "silu":
            raise ValueError(f"its activation {vision['hidden_act']!r:.100} is not supported, only 'silu'")
    layers = _layers(
        vision,
        inner=layer_inner,
        num_inward=2,
        qkv_bias=bias,
        output_bias=bias and is_ocr,
        mlp_bias=bias and is_ocr,
        num_others=2 * size + 2 * is_ocr * (size // int(vision["num_heads"])),
    )
    places = 0 if is_ocr else ((int(vision["image_size"]) // int(vision["patch_size"])) ** 2 + 1) * size
    merger = (size * side**2 + 1 + merged + 2 + 3 * merger_inner) * merged
    patches = (_patch_len(vision) + 1) * size
    spec = _qwen_spec("glm4v", hf, layers, patches + places + size + merger)
    settings = {
        "is_ocr": is_ocr,
        "layer_inner": layer_inner,
        "merger_inner": merger_inner,
        "clamp": clamp,
    }
    # The text model of GLM-5 Next has no positions. Frames of videos have the tokens of images.
    return replace(
        spec,
        hf=dict(vision) | settings,
        has_grid_positions=not is_next,
        video_token_id=None if is_ocr else spec.image_token_id,
    )


def _read_mistral3(name: str, hf: Mapping[str, Any]) -> VisionSpec:
    return _pixtral_spec(hf, int(hf["spatial_merge_size"]), bool(hf["multimodal_projector_bias"]))


def _read_mistral_large4(name: str, hf: Mapping[str, Any]) -> VisionSpec:
    return replace(_read_mistral3(name, hf), kind="mistral_large4")


def _pixtral_spec(hf: Mapping[str, Any], merge_size: int, bias: bool) -> VisionSpec:
    """Return the encoder of Pixtral.

    Args:
        merge_size: rows and columns of patches that a layer merges; 0 for no such layer.
    """
    vision, size = hf["vision_config"], _size(hf)
    if vision["model_type"] != "pixtral" or hf.get("vision_feature_layer", -1) != -1:
        raise ValueError(
            f"an encoder of type {vision['model_type']!r:.100} and its layer {hf.get('vision_feature_layer')!r:.100} "
            "are not supported, only the last layer of a pixtral"
        )
    embedding_size = int(hf["text_config"]["hidden_size"])
    layers = _layers(vision, num_inward=2, num_others=2 * size, **_NO_BIASES)
    projector = (size + embedding_size + 2 * bias) * embedding_size
    merger = size * merge_size**2 * size + size if merge_size else 0
    patch_len = int(vision["num_channels"]) * int(vision["patch_size"]) ** 2
    return VisionSpec(
        "pixtral",
        image_token_id=_image_token_id(hf),
        embedding_size=embedding_size,
        merge_size=merge_size or 1,
        layers=(layers,),
        num_parameters=(patch_len + 1) * size + layers.num_parameters() + projector + merger,
        hf=dict(vision)
        | {
            "has_merger": merge_size > 0,
            "projector_norm_eps": hf["text_config"].get("rms_norm_eps"),
            "projector_bias": bias,
            "projector_hidden_act": hf["projector_hidden_act"],
        },
    )


def _image_token_id(hf: Mapping[str, Any]) -> int:
    return int(hf["image_token_id"] if "image_token_id" in hf else hf["image_token_index"])


def _read_gemma3(name: str, hf: Mapping[str, Any]) -> VisionSpec:
    vision = _vit_settings(hf, ("siglip_vision_model",), last_layer=True)
    size, embedding_size = int(vision["hidden_size"]), int(hf["text_config"]["hidden_size"])
    return VisionSpec(
        "gemma3",
        image_token_id=_image_token_id(hf),
        embedding_size=embedding_size,
        attends_within="all",
        layers=(_layers(vision),),
        num_parameters=_vit_parameters(vision) + size * (embedding_size + 1),
        hf=vision | {"mm_tokens_per_image": hf["mm_tokens_per_image"]},
    )


def _read_paligemma(name: str, hf: Mapping[str, Any]) -> VisionSpec:
    vision, text = _vit_settings(hf, ("siglip_vision_model",), last_layer=True), hf["text_config"]
    size, embedding_size = int(vision["hidden_size"]), int(text["hidden_size"])
    if int(hf["projection_dim"]) != embedding_size:
        raise ValueError(
            f"its projection_dim is {hf['projection_dim']}, not the hidden size of the text model"
        )
    return VisionSpec(
        "paligemma",
        image_token_id=_image_token_id(hf),
        embedding_size=embedding_size,
        layers=(_layers(vision),),
        num_parameters=_vit_parameters(vision) + _linear(size, embedding_size),
        hf=vision,
    )


def _vit_settings(hf: Mapping[str, Any], model_types: Sequence[str], *, last_layer: bool) -> dict[str, Any]:
    """Return the configuration of a vision transformer, with what of it is used.

    Args:
        last_layer: the outputs after the norm behind the last layer are used; otherwise those of the layer
            ``vision_feature_layer``.
    """
    vision = dict(hf["vision_config"])
    if vision["model_type"] not in model_types:
        raise ValueError(
            f"an encoder of type {vision['model_type']!r:.100} is not supported, only {', '.join(model_types)}"
        )
    num_layers = int(vision["num_hidden_layers"])
    layer = -1 if last_layer else hf["vision_feature_layer"]
    if not isinstance(layer, int) or not -num_layers - 1 <= layer <= num_layers:
        raise ValueError(f"its layer {layer!r:.100} is not supported, only one of {num_layers} layers")
    return vision | {
        "num_used_layers": layer if layer >= 0 else num_layers + 1 + layer,
        "has_last_norm": last_layer,
    }


def _vit_parameters(
    vision: Mapping[str, Any],
    layers: EncoderLayers | None = None,
    *,
    has_class: bool = False,
    patch_bias: bool = True,
    num_norms: int | None = None,
) -> int:
    """Return the parameters of a vision transformer of which all layers and positions are used.

    Args:
        layers: None for those of most.
        num_norms: norms before and after the layers.
    """
    size, side, patch = (_length(vision[key]) for key in ("hidden_size", "image_size", "patch_size"))
    patches = (int(vision.get("num_channels", 3)) * patch**2 + patch_bias) * size
    places = ((side // patch) ** 2 + 2 * has_class) * size
    norms = int(vision["has_last_norm"]) if num_norms is None else num_norms
    return (layers or _layers(vision)).num_parameters() + patches + places + 2 * size * norms


def _projector(hf: Mapping[str, Any], vision: Mapping[str, Any], bias: bool) -> dict[str, Any]:
    """Return the settings of a projector of two linear layers."""
    return {
        "projector_norm": False,
        "projector_bias": bias,
        "projector_act": hf["projector_hidden_act"],
        "drops_class": hf["vision_feature_select_strategy"] == "default",
    }


def _read_llava(name: str, hf: Mapping[str, Any]) -> VisionSpec:
    """Return the encoder of LLaVA, or that of Pixtral, whose models have the same name."""
    if hf["vision_config"]["model_type"] == "pixtral":
        return _pixtral_spec(hf, 0, bool(hf["multimodal_projector_bias"]))
    return _llava_spec("llava", hf, {})


def _read_llava_next(name: str, hf: Mapping[str, Any]) -> VisionSpec:
    """Return the encoder of LLaVA-NeXT and OneVision; the latter shrinks images of many tiles."""
    most = hf.get("vision_aspect_ratio")
    tiles = {
        "tile_sizes": hf["image_grid_pinpoints"],
        "most_tiles": None if most is None else int(str(most).removeprefix("anyres_max_")),
    }
    return _llava_spec("llava_next", hf, tiles)


def _llava_spec(kind: str, hf: Mapping[str, Any], settings: Mapping[str, Any]) -> VisionSpec:
    vision = _vit_settings(hf, ("clip_vision_model", "siglip_vision_model"), last_layer=False)
    is_clip = vision["model_type"] == "clip_vision_model"
    size, embedding_size = int(vision["hidden_size"]), int(hf["text_config"]["hidden_size"])
    bias = bool(hf.get("multimodal_projector_bias", True))
    projector = (size + bias + embedding_size + bias) * embedding_size
    return VisionSpec(
        kind,
        image_token_id=_image_token_id(hf),
        embedding_size=embedding_size,
        layers=(_layers(vision),),
        num_parameters=_vit_parameters(
            vision, has_class=is_clip, patch_bias=not is_clip, num_norms=1 if is_clip else 0
        )
        + projector
        + (embedding_size if kind == "llava_next" else 0),
        hf=vision | _projector(hf, vision, bias) | dict(settings),
    )


def _read_internvl(name: str, hf: Mapping[str, Any]) -> VisionSpec:
    last_layer = hf["vision_feature_layer"] == -1
    vision = _vit_settings(hf, ("internvl_vision",), last_layer=last_layer)
    vision["has_last_norm"] = last_layer and not vision["use_mean_pooling"]
    if not vision["use_absolute_position_embeddings"] or vision["norm_type"] not in (
        "layer_norm",
        "rms_norm",
    ):
        raise ValueError("an encoder without learned positions, or with other norms, is not supported")
    if hf["vision_feature_select_strategy"] != "default":
        raise ValueError("an encoder whose first token is kept is not supported")
    size, embedding_size = int(vision["hidden_size"]), int(hf["text_config"]["hidden_size"])
    side = round(1 / float(hf["downsample_ratio"]))
    merged, has_head_norms = size * side**2, bool(vision["use_qk_norm"])
    norms = 2 if vision["norm_type"] == "rms_norm" else 4
    layers = _layers(
        vision,
        qkv_bias=bool(vision["attention_bias"]),
        num_others=(norms + 2 + 2 * has_head_norms) * size,
        is_divisible=not has_head_norms,
    )
    projector = 2 * merged + _linear(merged, embedding_size) + _linear(embedding_size, embedding_size)
    return VisionSpec(
        "llava",
        image_token_id=_image_token_id(hf),
        embedding_size=embedding_size,
        merge_size=side,
        layers=(layers,),
        num_parameters=_vit_parameters(vision, layers, has_class=True) + projector,
        hf=vision | _projector(hf, vision, bias=True) | {"projector_norm": True},
    )


def _read_idefics3(name: str, hf: Mapping[str, Any]) -> VisionSpec:
    vision = _vit_settings(hf, ("idefics3_vision", "smolvlm_vision"), last_layer=True)
    side, embedding_size = int(hf["scale_factor"]), int(hf["text_config"]["hidden_size"])
    merged = int(vision["hidden_size"]) * side**2
    return VisionSpec(
        "idefics3",
        image_token_id=_image_token_id(hf),
        embedding_size=embedding_size,
        merge_size=side,
        layers=(_layers(vision),),
        num_parameters=_vit_parameters(vision) + merged * embedding_size,
        hf=vision,
    )


def _read_llama4(name: str, hf: Mapping[str, Any]) -> VisionSpec:
    """Return the encoder of Llama 4, whose layers have one activation regardless of its configuration."""
    vision = _vit_settings(hf, ("llama4_vision_model",), last_layer=True) | {"hidden_act": "gelu"}
    side, embedding_size = (
        round(1 / float(vision["pixel_shuffle_ratio"])),
        int(hf["text_config"]["hidden_size"]),
    )
    merged = int(vision["hidden_size"]) * side**2
    inner = int(vision["projector_input_dim"])
    fields, needed = (
        ("intermediate_size", "projector_output_dim", "vision_output_dim"),
        [merged, inner, inner],
    )
    if (sizes := [int(vision[field]) for field in fields]) != needed:
        raise ValueError(f"{', '.join(fields)} are {sizes}, must be {needed}")
    return VisionSpec(
        "llama4",
        image_token_id=_image_token_id(hf),
        embedding_size=embedding_size,
        merge_size=side,
        layers=(_layers(vision),),
        num_parameters=_vit_parameters(vision, has_class=True, patch_bias=False, num_norms=2)
        + (merged + inner + embedding_size) * inner,
        hf=vision,
    )


def _grid_vit_others(vision: Mapping[str, Any], num_places: int, side: int, embedding_size: int) -> int:
    """Return the parameters beside the layers of a vision transformer of any grid, with a projector of two layers.

    Args:
        num_places: learned positions.
        side: rows and columns of patches of one embedding.
    """
    size = int(vision["hidden_size"])
    patches = _linear(int(vision.get("num_channels", 3)) * int(vision["patch_size"]) ** 2, size)
    merged = size * side**2
    projector = 2 * size + _linear(merged, merged) + _linear(merged, embedding_size)
    return patches + num_places * size + 2 * size + projector


def _read_paddleocr_vl(name: str, hf: Mapping[str, Any]) -> VisionSpec:
    vision = hf["vision_config"]
    num_places = (int(vision["image_size"]) // int(vision["patch_size"])) ** 2
    embedding_size, side = int(hf["text_config"]["hidden_size"]), int(vision["spatial_merge_size"])
    num_others = _grid_vit_others(vision, num_places, side, embedding_size)
    return _qwen_spec("paddleocr_vl", hf, _layers(vision), num_others)


def _read_kimi_k25(name: str, hf: Mapping[str, Any]) -> VisionSpec:
    vision, sides = hf["vision_config"], {int(side) for side in hf["vision_config"]["merge_kernel_size"]}
    size, embedding_size = int(vision["hidden_size"]), int(hf["text_config"]["hidden_size"])
    if len(sides) != 1 or int(hf["projection_hidden_size"]) != size:
        raise ValueError(
            f"merge_kernel_size {sorted(sides)} and projection_hidden_size {hf['projection_hidden_size']} are not "
            f"supported: the kernel is to be square, the size that of the encoder, {size}"
        )
    num_places, side = int(vision["pos_emb_height"]) * int(vision["pos_emb_width"]), sides.pop()
    layers = _layers(vision)
    return VisionSpec(
        "kimi_k25",
        image_token_id=_image_token_id(hf),
        embedding_size=embedding_size,
        merge_size=side,
        layers=(layers,),
        num_parameters=layers.num_parameters() + _grid_vit_others(vision, num_places, side, embedding_size),
        hf=dict(vision) | {"projector_eps": hf["projection_layer_norm_eps"]},
    )


def _read_deepseek_ocr2(name: str, hf: Mapping[str, Any]) -> VisionSpec:
    """Return the encoder of DeepSeek-OCR 2; it has one embedding for 16 patches, which the second part reads."""
    sam, encoder = (dict(hf["vision_config"][part]) for part in ("sam_config", "encoder_config"))
    if {*encoder["layer_types"]} != {"full_attention"} or not (sam["use_abs_pos"] and sam["use_rel_pos"]):
        raise ValueError("an encoder with sliding windows, or without learned positions, is not supported")
    size, inner, num_channels = (int(sam[key]) for key in ("hidden_size", "mlp_dim", "num_channels"))
    patch, head_dim = int(sam["patch_size"]), size // int(sam["num_attention_heads"])
    side, window = int(sam["image_size"]) // patch, int(sam["window_size"])
    channels, (first, last) = int(sam["output_channels"]), map(int, sam["downsample_channels"])
    layers = _layers(sam, inner=inner, qkv_bias=bool(sam["qkv_bias"]))
    num_layers = int(sam["num_hidden_layers"])
    num_global = sum(index in sam["global_attn_indexes"] for index in range(num_layers))
    distances = num_global * (2 * side - 1) + (num_layers - num_global) * (2 * window - 1)
    patches = layers.num_parameters() + 2 * head_dim * distances + _linear(num_channels * patch**2, size)
    convolutions = channels * (size + 9 * channels + 4 + 9 * first) + 9 * first * last
    query_layers = _layers(
        encoder,
        num_kv_heads=int(encoder["num_key_value_heads"]),
        num_inward=2,
        num_others=2 * int(encoder["hidden_size"]),
        **_NO_BIASES | {"qkv_bias": True},
    )
    queries = query_layers.num_parameters() + (1 + 144 + 256) * int(encoder["hidden_size"])
    embedding_size = int(hf["text_config"]["hidden_size"])
    output = _linear(int(encoder["hidden_size"]), embedding_size) + embedding_size
    return VisionSpec(
        "deepseek_ocr2",
        image_token_id=_image_token_id(hf),
        embedding_size=embedding_size,
        layers=(layers, query_layers),
        num_parameters=patches + side**2 * size + convolutions + queries + output,
        work_per_patch=patches + queries // 8,
        hf=sam | {"encoder_config": encoder},
    )


def _read_step3p7(name: str, hf: Mapping[str, Any]) -> VisionSpec:
    """Return the encoder of Step 3.7; it has one embedding for 16 patches."""
    vision, embedding_size = hf["vision_config"], int(hf["text_config"]["hidden_size"])
    size = _size(hf)
    patch, num_channels = int(vision["patch_size"]), int(vision["num_channels"])
    layers = _layers(vision, num_others=6 * size)
    every_patch = layers.num_parameters() + num_channels * patch**2 * size
    places = (int(vision["image_size"]) // patch) ** 2 * size
    halving = _linear(9 * size, 2 * size) + _linear(9 * 2 * size, 4 * size)
    output = (4 * size + bool(hf["projector_bias"])) * embedding_size
    return VisionSpec(
        "step3p7",
        image_token_id=_image_token_id(hf),
        embedding_size=embedding_size,
        layers=(layers,),
        num_parameters=every_patch + places + 2 * size + halving + output,
        work_per_patch=every_patch + (halving + output) // 4,
        hf=dict(vision)
        | {"projector_bias": hf["projector_bias"], "num_used_layers": vision["num_hidden_layers"]},
    )


def _read_muse_spark(name: str, hf: Mapping[str, Any]) -> VisionSpec:
    vision, embedding_size = hf["vision_config"], int(hf["text_config"]["hidden_size"])
    size, side = _size(hf), int(vision["merge_size"])
    merged, places = size * side**2, int(vision["pos_emb_height"])
    if int(hf["out_hidden_size"]) != merged or int(vision["pos_emb_width"]) != places:
        raise ValueError(
            f"out_hidden_size {hf['out_hidden_size']} and pos_emb_width {vision['pos_emb_width']} are not supported, "
            f"must be {merged} and {places}"
        )
    settings = dict(vision) | {
        "temporal_patch_size": vision["patch_temporal"],
        "in_channels": 3,
        "window_size": places * int(vision["patch_size"]),
        "fullatt_block_indexes": [
            index for index, kind in enumerate(vision["layer_types"]) if kind == "full_attention"
        ],
        "projector_hidden_size": hf["projector_hidden_size"],
        "projector_hidden_act": hf["projector_hidden_act"],
        "embedding_norm_eps": hf["text_config"]["rms_norm_eps"],
    }
    layers = _layers(vision)
    projector = (merged + int(hf["projector_hidden_size"]) + embedding_size) * int(
        hf["projector_hidden_size"]
    )
    return VisionSpec(
        "muse_spark",
        image_token_id=_image_token_id(hf),
        embedding_size=embedding_size,
        merge_size=side,
        layers=(layers,),
        num_parameters=(_patch_len(settings) + places**2 + 4) * size + layers.num_parameters() + projector,
        hf=settings,
    )


def _read_minimax_m3(name: str, hf: Mapping[str, Any]) -> VisionSpec:
    vision, text_size = hf["vision_config"], int(hf["text_config"]["hidden_size"])
    size, merge_size = int(vision["hidden_size"]), int(vision["spatial_merge_size"])
    projector = int(hf["projector_hidden_size"])
    layers = _layers(vision)
    patch_len = (
        int(vision["num_channels"]) * int(vision["temporal_patch_size"]) * int(vision["patch_size"]) ** 2
    )
    num_parameters = (
        (patch_len + 2) * size
        + layers.num_parameters()
        + _linear(size, projector)
        + _linear(merge_size**2 * text_size, projector)
        + 2 * _linear(projector, text_size)
    )
    return VisionSpec(
        "minimax_m3",
        image_token_id=_image_token_id(hf),
        embedding_size=text_size,
        merge_size=merge_size,
        layers=(layers,),
        num_parameters=num_parameters,
        hf=dict(vision) | {"projector_size": projector},
    )


def _read_gemma4(name: str, hf: Mapping[str, Any]) -> VisionSpec:
    vision, text = hf["vision_config"], hf["text_config"]
    size = _size(hf)
    if vision["num_key_value_heads"] != vision["num_attention_heads"] or vision["attention_bias"]:
        raise ValueError("an encoder with shared keys and values, or with biases, is not supported")
    head_dim, embedding_size = int(vision["head_dim"]), int(text["hidden_size"])
    layers = _layers(
        vision,
        head_dim=head_dim,
        num_inward=2,
        num_others=2 * head_dim + 4 * size,
        is_divisible=not vision["use_clipped_linears"],
        **_NO_BIASES,
    )
    num_parameters = (
        3 * int(vision["patch_size"]) ** 2 * size
        + 2 * int(vision["position_embedding_size"]) * size
        + layers.num_parameters()
        + size * embedding_size
    )
    attends = text.get("use_bidirectional_attention") == "vision"
    return VisionSpec(
        "gemma4",
        image_token_id=_image_token_id(hf),
        embedding_size=embedding_size,
        merge_size=int(vision["pooling_kernel_size"]),
        attends_within="windows" if attends else "none",
        layers=(layers,),
        num_parameters=num_parameters,
        hf=vision,
    )


# Architecture |-> function that reads the spec of its encoder from the name and the whole configuration of a model.
VISION_READERS: dict[str, Callable[[str, Mapping[str, Any]], VisionSpec]] = {
    "Qwen2_5_VLForConditionalGeneration": _read_qwen2_5_vl,
    "Mistral3ForConditionalGeneration": _read_mistral3,
    "MistralLarge4ForConditionalGeneration": _read_mistral_large4,
    "MiniMaxM3SparseForConditionalGeneration": _read_minimax_m3,
    "Glm4vForConditionalGeneration": _read_glm4v,
    "Glm4vMoeForConditionalGeneration": _read_glm4v,
    "Glm46VForConditionalGeneration": _read_glm4v,
    "GlmOcrForConditionalGeneration": _read_glm4v,
    "Glm5NextForConditionalGeneration": _read_glm4v,
    "LlavaForConditionalGeneration": _read_llava,
    "LlavaNextForConditionalGeneration": _read_llava_next,
    "LlavaOnevisionForConditionalGeneration": _read_llava_next,
    "InternVLForConditionalGeneration": _read_internvl,
    "Idefics3ForConditionalGeneration": _read_idefics3,
    "SmolVLMForConditionalGeneration": _read_idefics3,
    "Gemma3ForConditionalGeneration": _read_gemma3,
    "PaliGemmaForConditionalGeneration": _read_paligemma,
    "Llama4ForConditionalGeneration": _read_llama4,
    "PaddleOCRVLForConditionalGeneration": _read_paddleocr_vl,
    "KimiK25ForConditionalGeneration": _read_kimi_k25,
    "DeepseekOcr2ForConditionalGeneration": _read_deepseek_ocr2,
    "Step3p7ForConditionalGeneration": _read_step3p7,
    "MuseSparkForConditionalGeneration": _read_muse_spark,
    "Gemma4ForConditionalGeneration": _read_gemma4,
    "Qwen3VLForConditionalGeneration": _read_qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": _read_qwen3_vl,
    "Qwen3_5ForConditionalGeneration": _read_qwen3_vl,
    "Qwen3_5MoeForConditionalGeneration": _read_qwen3_vl,
    "Qwen4ExpForConditionalGeneration": _read_qwen3_vl,
}


def _with_layers(spec: VisionSpec) -> VisionSpec:
    """Return the spec with what its layers attend to, by which its work is counted."""
    hf, side = spec.hf, _length(spec.hf["patch_size"])
    num_layers = spec.layers[0].count
    windows = [0] * num_layers
    if "num_used_layers" in hf:  # tiles of one size
        windows = [(_length(hf["image_size"]) // side) ** 2] * num_layers
    elif "fullatt_block_indexes" in hf:
        window = (int(hf["window_size"]) // side) ** 2
        windows = [0 if index in hf["fullatt_block_indexes"] else window for index in range(num_layers)]
    elif "global_attn_indexes" in hf:  # tiles of one size, with windows
        tile, window = (_length(hf["image_size"]) // side) ** 2, int(hf["window_size"]) ** 2
        windows = [tile if index in hf["global_attn_indexes"] else window for index in range(num_layers)]
    num_channels = int(hf.get("in_channels", hf.get("num_channels", 3)))
    patch_len = num_channels * int(hf.get("temporal_patch_size", 1)) * side**2
    return replace(spec, layer_windows=tuple(windows), patch_bytes=4 * patch_len)


def _length(value: Any) -> int:
    """Return the length of a side, which some configurations state twice."""
    return int(value[0] if isinstance(value, (list, tuple)) else value)


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
        return _with_layers(reader(name, hf))
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{name}: the configuration of its image encoder cannot be read: {error!r}"
        ) from error
