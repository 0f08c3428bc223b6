"""Quantized checkpoints with the names, prefixes and configurations that are published, for each newer family."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from quantized_models import Scheme, write_quantized
from safetensors.torch import load_file, save_file
from state_kinds import STATE_KINDS
from torch import Tensor

Tensors = dict[str, Tensor]

FLOAT8_CHANNELS = Scheme("codes", is_float=True, group_len=None)
FLOAT8_BLOCKS = Scheme("float8", is_float=True, block=(16, 16))
PACKED_4_BITS = Scheme("packed", symmetric=True, group_len=16)


@dataclass(frozen=True)
class Published:
    """A published checkpoint.

    Attributes:
        kind, overrides: of the model, as for make_model.
        config: of quantization_config, added to that of the scheme.
        fields: of the rest of config.json; None for those that it lacks.
        prefix: of the text model's tensors within a model that also reads images.
        architecture: of that model, and its model type; empty if the model reads text only.
        head: prefix of the head in that model.
        rewrite: changes the stored tensors.
    """

    kind: str
    scheme: Any
    overrides: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    architecture: tuple[str, str] = ("", "")
    head: str = "lm_head."
    rewrite: Callable[[Tensors], Tensors] | None = None


def one_scale(tensors: Tensors) -> Tensors:
    """Store float8 weights with one scale, as tools do that quantize activations with one scale as well."""
    for name, scales in list(tensors.items()):
        if name.endswith((".weight_scale", ".weight_scale_inv")):
            layer, _, suffix = name.rpartition(".")
            number = tensors[f"{layer}.weight"].float() * scales.float()
            scale = number.abs().max() / 448
            tensors[f"{layer}.weight"] = (number / scale).to(torch.float8_e4m3fn)
            tensors[name] = scale.reshape(() if suffix == "weight_scale_inv" else (1,))
            tensors[f"{layer}.input_scale"] = torch.ones(1)
            tensors[f"{layer}.activation_scale"] = torch.ones(())
    return tensors


def with_mtp_head(tensors: Tensors) -> Tensors:
    """Append the layer that predicts further tokens."""
    last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.2.")}
    tensors |= {name.replace("layers.2.", "layers.3."): tensor.clone() for name, tensor in last.items()}
    norms = {
        f"model.layers.3.{name}.weight": torch.ones(64) for name in ("enorm", "hnorm", "shared_head.norm")
    }
    return tensors | norms | {"model.layers.3.eh_proj.weight": torch.zeros(64, 128)}


def with_ernie_mtp_head(tensors: Tensors) -> Tensors:
    """Add the layer of ERNIE 4.5 that predicts further tokens."""
    first = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.0.")}
    layer = {
        name.replace("layers.0.", "mtp_block.0."): tensor.clone()
        for name, tensor in first.items()
        if not name.endswith("_scale")
    }
    norms = {f"model.mtp_{name}_norm.0.weight": torch.ones(64) for name in ("emb", "hidden")}
    return tensors | layer | norms | {"model.mtp_linear_proj.0.weight": torch.zeros(64, 128)}


def with_scales_of_cache(tensors: Tensors) -> Tensors:
    """Add scales of keys and values for a cache in float8, which are not used."""
    layers = [
        name.removesuffix(".weight")
        for name in tensors
        if name.endswith((".k_proj.weight", ".v_proj.weight"))
    ]
    return tensors | {f"{name}.{name[-6]}_scale": torch.ones(()) for name in layers}


def as_deepseek_v4(tensors: Tensors) -> Tensors:
    """Name scales as DeepSeek-V4 does, with their dtypes, and add a layer that predicts further tokens."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        layer, _, suffix = name.rpartition(".")
        if suffix == "weight_packed":
            found[f"{layer}.weight"] = tensor.view(torch.int8)
        elif suffix == "weight_scale":
            found[f"{layer}.scale"] = tensor.view(torch.float8_e8m0fnu)
        elif suffix == "weight_scale_inv":
            found[f"{layer}.scale"] = tensor
        else:
            found[name] = tensor
    head = {name: tensor for name, tensor in found.items() if name.startswith("layers.0.")}
    return found | {name.replace("layers.", "mtp.", 1): tensor.clone() for name, tensor in head.items()}


# Of config.json of DeepSeek-V4-Flash, where transformers writes its own names.
_V4_FIELDS = {
    "compress_ratios": [0, 4, 128, 0],
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 1,
    "qk_rope_head_dim": 8,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    **dict.fromkeys(("layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor")),
    "rope_parameters": None,
}
_V4_OVERRIDES = {
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "head_dim": 32,
    "index_head_dim": 32,
    "partial_rotary_factor": 1 / 4,
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
_V4_IGNORED = r"\.compressor\.|weights_proj"
CHECKPOINTS = {
    # Experts in float4 and the rest in float8, but for compressors and the weights of an indexer's heads.
    "deepseek_v4-fp8-fp4": Published(
        "deepseek_v4",
        Scheme(
            "float8",
            is_float=True,
            block=(16, 16),
            has_powers_of_two=True,
            experts=Scheme("mxfp4", is_float=True),
            ignored=_V4_IGNORED,
        ),
        STATE_KINDS["deepseek_v4"] | _V4_OVERRIDES,
        {"scale_fmt": "ue8m0"},
        _V4_FIELDS | {"expert_dtype": "fp4"},
        rewrite=as_deepseek_v4,
    ),
    # As DeepSeek-V4-Flash-Base, whose compressors are in float8 too, with scales in float32.
    "deepseek_v4-fp8": Published(
        "deepseek_v4",
        Scheme("float8", is_float=True, block=(16, 16), ignored="weights_proj"),
        STATE_KINDS["deepseek_v4"] | _V4_OVERRIDES,
        fields=_V4_FIELDS | {"expert_dtype": "fp8"},
        rewrite=as_deepseek_v4,
    ),
    "llama4-fp8": Published(
        "llama4_text",
        Scheme("codes", is_float=True, group_len=None, ignored=r"self_attn|layers\.0\.feed_forward\.[gud]"),
        config={
            "ignore": ["language_model.lm_head", "re:.*self_attn", "re:.*router", "re:vision_model.*"],
        },
        prefix="language_model.model.",
        architecture=("Llama4ForConditionalGeneration", "llama4"),
        head="language_model.lm_head.",
    ),
    "llama4-w4a16": Published(
        "llama4_text",
        PACKED_4_BITS,
        config={"ignore": ["re:.*lm_head", "re:.*router", "re:multi_modal_projector.*"]},
        prefix="language_model.model.",
        architecture=("Llama4ForConditionalGeneration", "llama4"),
        head="language_model.lm_head.",
    ),
    "glm4_moe-fp8": Published(
        "glm4_moe",
        FLOAT8_CHANNELS,
        {"attention_bias": True, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
        {"ignore": ["lm_head", "model.layers.3.eh_proj", "re:.*mlp.gate$"]},
        rewrite=with_mtp_head,
    ),
    # All layers of an indexer are in float8, except for the weights of its heads.
    "deepseek_v32-fp8": Published(
        "deepseek_v32",
        Scheme("float8", is_float=True, block=(16, 16), ignored=r"mlp\.gate\.|weights_proj|lm_head|embed"),
        {"num_nextn_predict_layers": 1},
        {"fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"},
        rewrite=with_mtp_head,
    ),
    "minimax_m2-fp8": Published(
        "minimax_m2",
        FLOAT8_BLOCKS,
        config={
            "fmt": "float8_e4m3fn",
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
    ),
    "qwen3_moe-fp8": Published(
        "qwen3_moe",
        FLOAT8_BLOCKS,
        config={"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]},
    ),
    "qwen3_moe-gptq": Published(
        "qwen3_moe",
        Scheme("gptq", symmetric=True, group_len=16),
        config={"lm_head": False, "dynamic": {"-:.*mlp\\.gate$": {}}},
    ),
    "qwen3_moe-awq": Published(
        "qwen3_moe", Scheme("awq", group_len=16), config={"modules_to_not_convert": ["mlp.gate"]}
    ),
    "qwen3_moe-nvfp4": Published(
        "qwen3_moe",
        Scheme("nvfp4", group_len=16, is_float=True),
        config={"ignore": ["lm_head", "re:.*mlp.gate$"]},
    ),
    "qwen3_moe-modelopt": Published(
        "qwen3_moe",
        Scheme("modelopt", group_len=16, is_float=True),
        config={
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}
            },
            "ignore": ["lm_head", "model.layers.0.mlp.gate"],
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        },
        rewrite=with_scales_of_cache,
    ),
    "gemma3-w4a16": Published(
        "gemma3_text",
        PACKED_4_BITS,
        config={"ignore": ["lm_head", "re:vision_tower.*", "re:multi_modal_projector.*"]},
        prefix="language_model.model.",
        architecture=("Gemma3ForConditionalGeneration", "gemma3"),
    ),
    "gemma4-fp8": Published(
        "gemma4_text",
        FLOAT8_CHANNELS,
        {
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
        {"ignore": ["lm_head", "re:.*router.*", "re:model.vision_tower.*"]},
        prefix="model.language_model.",
        architecture=("Gemma4ForConditionalGeneration", "gemma4"),
    ),
    "cohere2-w4a16": Published(
        "cohere2", PACKED_4_BITS, {"sliding_window": 11, "tie_word_embeddings": True}, {"ignore": ["lm_head"]}
    ),
    "ernie4_5_moe-fp8": Published(
        "ernie4_5_moe",
        FLOAT8_CHANNELS,
        {"use_bias": False, "num_nextn_predict_layers": 1},
        {"ignore": ["lm_head", "re:.*mlp.gate$", "re:.*moe_statics.*", "re:.*mtp.*"]},
        rewrite=with_ernie_mtp_head,
    ),
    "mistral3-fp8": Published(
        "mistral",
        Scheme("float8", is_float=True),
        {"sliding_window": None},
        {
            "activation_scheme": "static",
            "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        },
        prefix="language_model.model.",
        architecture=("Mistral3ForConditionalGeneration", "mistral3"),
        head="language_model.lm_head.",
        rewrite=one_scale,
    ),
    "llama-fp8-frozen": Published(
        "llama",
        FLOAT8_CHANNELS,
        config={
            "format": "naive-quantized",
            "quantization_status": "frozen",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8}},
                "attention": {"targets": ["LlamaAttention"], "weights": None},
            },
        },
        rewrite=one_scale,
    ),
}


def split_stacks(source: Path, folder: Path) -> Path:
    """Write the model with the matrices of stacked experts under names of their own, as tools quantize them."""
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        stack, (block, _, matrix) = tensors.pop(name), name.rpartition(".")
        transposed = "feed_forward" in block  # of Llama 4
        for index, expert in enumerate(stack):
            rows = expert.t() if transposed else expert
            parts = (
                {"down_proj": rows}
                if matrix == "down_proj"
                else dict(zip(("gate_proj", "up_proj"), rows.chunk(2), strict=True))
            )
            for own, part in parts.items():
                tensors[f"{block}.{index}.{own}.weight"] = part.contiguous()
    folder.mkdir()
    for file in source.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def dequantized(tensors: Tensors) -> Tensors:
    """Return the tensors with float8 weights of one scale multiplied out."""
    found = dict(tensors)
    for name, scale in tensors.items():
        if name.endswith((".weight_scale", ".weight_scale_inv")):
            layer = name.rpartition(".")[0]
            for suffix in ("input_scale", "activation_scale", name.rpartition(".")[2]):
                del found[f"{layer}.{suffix}"]
            found[f"{layer}.weight"] = tensors[f"{layer}.weight"].float() * scale
    return found


def publish(folder: Path, published: Published) -> None:
    """Change names and configuration to the published ones; store the tensors in two shards."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= published.config
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    architecture, model_type = published.architecture
    if architecture:
        body = published.prefix
        tensors = {
            published.head + name.removeprefix("lm_head.")
            if name.startswith("lm_head.")
            else body + name.removeprefix("model."): tensor
            for name, tensor in tensors.items()
        }
        tensors["vision_tower.patch.weight"] = torch.zeros(3, 4)
        outer = {"architectures": [architecture], "model_type": model_type, "dtype": config.pop("dtype")}
        outer["quantization_config"] = config.pop("quantization_config")
        del config["architectures"]
        config = outer | {"text_config": config}
    config = {name: value for name, value in {**config, **published.fields}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    names, files = sorted(tensors), dict[str, str]()
    for shard in range(2):
        file = f"model-{shard + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names[shard::2]}, folder / file)
        files |= dict.fromkeys(names[shard::2], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def write_published(source: Path, folder: Path, published: Published) -> tuple[Path, Path]:
    """Write the model as published, and a twin with the dequantized weights in float32."""
    quantized, twin = write_quantized(split_stacks(source, folder / "split"), folder, published.scheme)
    if published.rewrite is not None:
        tensors = published.rewrite(load_file(quantized / "model.safetensors"))
        save_file(tensors, quantized / "model.safetensors", metadata={"format": "pt"})
        if published.rewrite is one_scale:
            save_file(dequantized(tensors), twin / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((twin / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    publish(quantized, published)
    return quantized, twin
