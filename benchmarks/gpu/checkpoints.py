"""Checkpoints of random weights, made on the device so that 16 GB take seconds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 4 << 30

# Name and shape of each tensor.
Shapes = Iterator[tuple[str, tuple[int, ...]]]


# Name, shape and device |-> a tensor of a format of its own; None for one of the model's dtype.
MakeWeight = Callable[[str, tuple[int, ...], str], Tensor | None]


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    shapes: Shapes,
    dtype: str,
    device: str,
    make: MakeWeight = lambda name, shape, device: None,
) -> int:
    """Write a model unless it is there; return the bytes of its weights."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
        weight_map, total = _write_shards(folder, shapes, getattr(torch, dtype), device, make)
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return int(json.loads(index.read_text())["metadata"]["total_size"])


def _write_shards(
    folder: Path, shapes: Shapes, dtype: torch.dtype, device: str, make: MakeWeight
) -> tuple[dict[str, str], int]:
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total, num_shards = 0, 0
    for name, shape in shapes:
        special = make(name, shape, device)
        tensor = random_weight(name, shape, dtype, device) if special is None else special
        if shard and sum(each.nbytes for each in shard.values()) + tensor.nbytes > SHARD_BYTES:
            save_file(shard, folder / f"model-{num_shards:05}.safetensors")
            shard, num_shards = {}, num_shards + 1
        shard[name] = tensor
        weight_map[name] = f"model-{num_shards:05}.safetensors"
        total += tensor.nbytes
    save_file(shard, folder / f"model-{num_shards:05}.safetensors")
    return weight_map, total


def random_weight(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return a weight that keeps the variance of its inputs, as benchmarks.random_models does."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    gain = (
        0.05 * shape[1] ** 0.5 if "embed" in name else 2.0 if "q_proj" in name or "lm_head" in name else 1.0
    )
    return (torch.randn(shape, dtype=dtype, device=device) * gain * shape[1] ** -0.5).cpu()
