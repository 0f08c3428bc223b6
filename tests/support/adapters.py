"""LoRA adapters in PEFT's layout for the models of tests, and the models with such adapters merged in."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.proto.lora import LoraLoad
from quire.proto.step import StepPlan
from quire.worker.lora.adapters import RankAdapters

# Modules of a Llama-like layer.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
VOCABULARY = ("embed_tokens", "lm_head")


def write_adapter(
    folder: Path,
    model: Path,
    modules: Sequence[str] = ATTENTION + MLP,
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    size: float = 0.4,
    stacks: str = "eoi",
    **config: Any,
) -> Path:
    """Write a random adapter of some kinds of modules in all layers of a model; return its folder.

    Args:
        size: of the update beside the weight, which it must be large enough to change the tokens.
        stacks: dimensions of the stacked matrices of experts, as PEFT takes them: ``eoi`` for experts, outputs and
            inputs; ``eio`` for transposed matrices, and for all in PEFT before 0.19.1.
        config: entries of adapter_config.json; a `rank_pattern` and an `alpha_pattern` are applied.
    """
    generator = torch.Generator().manual_seed(seed)
    ranks, alphas = config.get("rank_pattern", {}), config.get("alpha_pattern", {})
    tensors: dict[str, Tensor] = {}
    parameters = []
    for name, weight in _untied_weights(model).items():
        module = name.removesuffix(".weight")
        kind = module.rpartition(".")[2]
        if kind not in modules or weight.dim() < 2:
            continue
        if weight.dim() == 3:
            parameters.append(name)
            is_only = not {"gate_up_proj", "down_proj"} <= set(modules)
            own_rank, own_alpha = _own(ranks, name, rank), _own(alphas, name, alpha)
            tensors |= _random_stack(name, weight, own_rank, own_alpha, stacks, generator, is_only=is_only)
            continue
        if kind.startswith("embed"):
            weight = weight.T
        own_rank, own_alpha = _own(ranks, module, rank), _own(alphas, module, alpha)
        scaling = own_alpha / (math.sqrt(own_rank) if config.get("use_rslora") else own_rank)
        a = torch.randn(own_rank, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
        b = torch.randn(weight.shape[0], own_rank, generator=generator) * (size / scaling / own_rank**0.5)
        for side, matrix in zip("AB", (a, b), strict=True):
            tensors[_key(module, side)] = matrix
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(modules),
        "target_parameters": parameters,
        "stacks": stacks,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merge(folder: Path, model: Path, adapter: Path) -> Path:
    """Write the model with the adapter added to its weights; return its folder.

    Of a model with a tied head, which has no weight of its own, the head is untied: its adapter is another.
    """
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors, weights = load_file(adapter / "adapter_model.safetensors"), _untied_weights(model)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if name in config["target_parameters"]:
            weights[name] = weight + _stacked_update(name, weight, config, tensors)
            continue
        if _key(module, "A") not in tensors:
            continue
        rank = _own(config.get("rank_pattern", {}), module, config["r"])
        alpha = _own(config.get("alpha_pattern", {}), module, config["lora_alpha"])
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        a, b = (tensors[_key(module, side)].double() for side in "AB")
        update = scaling * (b @ a)
        weights[name] = (weight.double() + (update if update.shape == weight.shape else update.T)).to(
            weight.dtype
        )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": False}))
    return folder


def _key(module: str, side: str) -> str:
    """Return the name of a matrix of a module's adapter; those of embeddings have other names."""
    is_embedding = module.rpartition(".")[2].startswith("embed")
    return f"base_model.model.{module}." + (
        f"lora_embedding_{side}" if is_embedding else f"lora_{side}.weight"
    )


def load_plan(step_id: int, digest: int, paths: list[Path]) -> StepPlan:
    """Return a plan that computes nothing, and has adapters read."""
    loads = tuple(LoraLoad(index, str(path)) for index, path in enumerate(paths))
    return StepPlan(step_id, 1, digest, lora_loads=loads)


def put_adapters(engine: Any, paths: list[Path]) -> None:
    """Read adapters on all ranks, and put adapter i into slot i."""
    engine.step(load_plan(1, 0, paths))
    for runner in engine.runners:
        adapters: RankAdapters = runner.memory.loaded.adapters
        while len(adapters.store) < len(paths):
            reports = adapters.store.take_reports(60)
            assert [report.error for report in reports] == [""] * len(reports)
    slots = np.array([[index, index] for index in range(len(paths))], np.int32)
    engine.step(StepPlan(1, 1, 0, lora_slots=slots))


def _random_stack(
    name: str,
    weight: Tensor,
    rank: int,
    alpha: float,
    stacks: str,
    generator: torch.Generator,
    *,
    is_only: bool,
) -> dict[str, Tensor]:
    """Return the factors of a stacked matrix [X, ., .]."""
    lengths = dict(zip(stacks, weight.shape, strict=True))
    count, inputs, outputs = lengths["e"], lengths["i"], lengths["o"]
    a = torch.randn(count * rank, inputs, generator=generator) / inputs**0.5
    b = torch.randn(outputs, rank * count, generator=generator) * (0.4 * rank / alpha / rank**0.5)
    prefix = _stored_as(name, is_only=is_only)
    return {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}


def _stacked_update(name: str, weight: Tensor, config: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    """Return the update of a stacked matrix, as PEFT computes it."""
    kinds = {each.rpartition(".")[2] for each in config["target_parameters"]}
    prefix, count = _stored_as(name, is_only=len(kinds) == 1), len(weight)
    a = tensors[f"{prefix}.lora_A.weight"].unflatten(0, (count, -1))
    b = tensors[f"{prefix}.lora_B.weight"].unflatten(1, (-1, count))
    update: Tensor = torch.einsum(f"ore,eri->{config['stacks']}", b, a)
    rank = _own(config.get("rank_pattern", {}), name, config["r"])
    return update.mul(_own(config.get("alpha_pattern", {}), name, config["lora_alpha"]) / rank)


def _stored_as(name: str, *, is_only: bool) -> str:
    """Return the module of a stacked matrix's factors: wrappers are nested, that of gate_up_proj is the inner one."""
    module, _, kind = name.rpartition(".")
    return f"base_model.model.{module}" + ("" if is_only or kind == "down_proj" else ".base_layer")


def _own(table: dict[str, Any], module: str, default: Any) -> Any:
    """Return the entry of a module in a pattern, as PEFT finds it."""
    return next((own for key, own in table.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _untied_weights(model: Path) -> dict[str, Tensor]:
    weights = _weights(model)
    embedding = next(name for name in weights if name.endswith("embed_tokens.weight"))
    return {"lm_head.weight": weights[embedding].clone(), **weights}


def _weights(model: Path) -> dict[str, Tensor]:
    weights = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            weights.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return weights
