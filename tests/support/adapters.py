"""LoRA adapters in PEFT's layout for the models of tests, and the models with such adapters merged in."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

# Modules of a Llama-like layer.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: Path,
    modules: Sequence[str] = ATTENTION + MLP,
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    size: float = 0.4,
    **config: Any,
) -> Path:
    """Write a random adapter of some kinds of modules in all layers of a model; return its folder.

    Args:
        size: of the update beside the weight, which it must be large enough to change the tokens.
        config: entries of adapter_config.json; a `rank_pattern` and an `alpha_pattern` are applied.
    """
    generator = torch.Generator().manual_seed(seed)
    ranks, alphas = config.get("rank_pattern", {}), config.get("alpha_pattern", {})
    tensors = {}
    for name, weight in _weights(model).items():
        module = name.removesuffix(".weight")
        kind = module.rpartition(".")[2]
        if kind not in modules or weight.dim() != 2:
            continue
        own_rank, own_alpha = ranks.get(kind, rank), alphas.get(kind, alpha)
        scaling = own_alpha / (math.sqrt(own_rank) if config.get("use_rslora") else own_rank)
        a = torch.randn(own_rank, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
        b = torch.randn(weight.shape[0], own_rank, generator=generator) * (size / scaling / own_rank**0.5)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(modules),
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merge(folder: Path, model: Path, adapter: Path) -> Path:
    """Write the model with the adapter added to its weights; return its folder."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors, weights = load_file(adapter / "adapter_model.safetensors"), _weights(model)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        kind, prefix = module.rpartition(".")[2], f"base_model.model.{module}"
        if f"{prefix}.lora_A.weight" not in tensors:
            continue
        rank = config.get("rank_pattern", {}).get(kind, config["r"])
        alpha = config.get("alpha_pattern", {}).get(kind, config["lora_alpha"])
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        a, b = (tensors[f"{prefix}.lora_{side}.weight"].double() for side in "AB")
        weights[name] = (weight.double() + scaling * (b @ a)).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(model: Path) -> dict[str, Tensor]:
    weights = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            weights.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return weights
