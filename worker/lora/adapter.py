"""LoraAdapter: one rank's part of an adapter in host memory, read from PEFT's layout.

The layout: adapter_config.json, and adapter_model.safetensors with two matrices per module,
``base_model.model.<module>.lora_A.weight`` [R, K] and ``...lora_B.weight`` [N, R].
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..weights.safetensors_file import SafetensorsFile, StoredTensor
from ..weights.weight_slice import WeightSlice
from .adapter_config import CONFIG_NAME, WEIGHTS_NAME, AdapterConfig, read_adapter_config
from .layers import LoraLayers, PartFactors

_PREFIX = "base_model.model."
_SUFFIXES = {".lora_A.weight": "a", ".lora_B.weight": "b"}
# Names that an error lists.
_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """One rank's part of an adapter.

    Attributes:
        factors: by layer of LoraLayers and part of the layer; None for a part that the adapter leaves unchanged.
        digest: of the adapter's files.
    """

    factors: tuple[tuple[PartFactors | None, ...], ...]
    digest: str


def read_adapter(path: str, layers: LoraLayers) -> LoraAdapter:
    """Read this rank's part of an adapter.

    Raises:
        ValueError: the adapter is malformed, does not fit the model, or is not supported; says why.
        OSError: a file cannot be read.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError("there is no such directory on this rank's node")
    config = read_adapter_config(folder, layers.max_rank)
    if not (folder / WEIGHTS_NAME).is_file():
        raise ValueError(f"it has no {WEIGHTS_NAME}; other formats are not read")
    with closing(SafetensorsFile(folder / WEIGHTS_NAME)) as file:
        stored = _find_matrices(file.tensors)
        _check_modules(stored, config, layers.shapes)
        factors = tuple(
            tuple(_read_part(file, stored.get(part.name), part, config, layers.dtype) for part in layer.parts)
            for layer in layers
        )
        digest = _digest(folder, file.tensors)
    return LoraAdapter(factors, digest)


def _find_matrices(tensors: Mapping[str, StoredTensor]) -> dict[str, dict[str, str]]:
    """Return module |-> {"a": name, "b": name}."""
    found: dict[str, dict[str, str]] = {}
    for name, tensor in tensors.items():
        suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)
        if suffix is None or not name.startswith(_PREFIX):
            raise ValueError(f"tensor {name!r} is not a matrix of a linear layer's adapter")
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"tensor {name!r} has dtype {tensor.dtype}, must be a floating-point type")
        module = name.removeprefix(_PREFIX).removesuffix(suffix)
        found.setdefault(module, {})[_SUFFIXES[suffix]] = name
    if not found:
        raise ValueError(f"{WEIGHTS_NAME} has no tensors")
    return found


def _check_modules(
    stored: dict[str, dict[str, str]], config: AdapterConfig, shapes: Mapping[str, tuple[int, int]]
) -> None:
    """Check that the model has every module that the adapter changes."""
    unknown = sorted(set(stored) - set(shapes))
    if unknown:
        kinds = sorted({name.rpartition(".")[2] for name in shapes})
        others = f" and {len(unknown) - _MAX_LISTED} more" if len(unknown) > _MAX_LISTED else ""
        raise ValueError(
            f"it changes {', '.join(unknown[:_MAX_LISTED])}{others}; adapters of this model may change its layers' "
            f"{', '.join(kinds)}"
        )
    for module, names in stored.items():
        if len(names) < 2:
            raise ValueError(f"module {module} has {next(iter(names.values()))!r} alone, without its partner")


def _read_part(
    file: SafetensorsFile,
    names: Mapping[str, str] | None,
    part: WeightSlice,
    config: AdapterConfig,
    dtype: torch.dtype,
) -> PartFactors | None:
    if names is None:
        return None
    rank, (out_features, in_features) = config.rank_of(part.name), part.shape
    for key, shape in (("a", (rank, in_features)), ("b", (out_features, rank))):
        actual = file.tensors[names[key]].shape
        if actual != shape:
            raise ValueError(f"tensor {names[key]!r} has shape {list(actual)}, must have {list(shape)}")
    (first_input, num_inputs), (first_output, num_outputs) = part.inputs, part.outputs
    a = _read_finite(file, names["a"], (0, first_input), (rank, num_inputs))
    b = _read_finite(file, names["b"], (first_output, 0), (num_outputs, rank))
    if part.interleaving is not None:
        b = b[part.interleaving.order(num_outputs)]
    scaled = b.T * config.scaling_of(part.name)
    return PartFactors(a.to(dtype), scaled.contiguous().to(dtype))


def _read_finite(file: SafetensorsFile, name: str, starts: Sequence[int], shape: tuple[int, int]) -> Tensor:
    out = torch.empty(shape, dtype=torch.float32)
    file.read_into(out, name, starts)
    if not out.isfinite().all():
        raise ValueError(f"tensor {name!r} has numbers that are not finite")
    return out


def _digest(folder: Path, tensors: Mapping[str, StoredTensor]) -> str:
    """Return a digest by which ranks notice that their nodes have different files under one path.

    Of the configuration, and of the names, shapes and places of the tensors, but not of all their numbers: each rank
    reads only its part of these.
    """
    digest = hashlib.sha256((folder / CONFIG_NAME).read_bytes())
    digest.update(str(os.stat(folder / WEIGHTS_NAME).st_size).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape} {tensor.offset}".encode())
    return digest.hexdigest()
