"""LoraAdapter: one rank's part of an adapter in host memory, read from PEFT's layout.

The layout: adapter_config.json, and adapter_model.safetensors with two matrices per module,
``base_model.model.<module>.lora_A.weight`` [R, K] and ``...lora_B.weight`` [N, R]. Those of an embedding are
``...lora_embedding_A`` [R, V] and ``...lora_embedding_B`` [E, R]. The experts of a mixture are one module each, or
stored together (see expert_stacks).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from ..weights.safetensors_file import SafetensorsFile
from ..weights.weight_slice import WeightSlice
from .adapter_config import CONFIG_NAME, WEIGHTS_NAME, AdapterConfig, read_adapter_config
from .adapter_tensors import AdapterTensors
from .expert_stacks import StoredStack, find_stacks, read_stack, rename_routers
from .layers import LayerFactors, LoraLayer, LoraLayers, PartFactors

# Names that an error lists.
_MAX_LISTED = 8
_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """One rank's part of an adapter.

    Attributes:
        factors: by layer of LoraLayers; None for a layer that the adapter leaves unchanged.
        digest: of the content of the adapter's files.
    """

    factors: tuple[LayerFactors | None, ...]
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
        tensors = AdapterTensors(file)
        rename_routers(tensors, layers.modules)
        stacks = find_stacks(tensors, layers)
        _check_modules(tensors, stacks.values(), layers)
        _check_embeddings(tensors, layers)
        if config.ensures_tying:
            _check_tying(tensors)

        def read(layer: LoraLayer) -> LayerFactors | None:
            if layer in stacks:
                return read_stack(tensors, stacks[layer], layer, config)
            return layer.pack([_read_part(tensors, part, config, layers.dtype) for part in layer.parts])

        factors = tuple(map(read, layers))
        digest = _digest(folder)
    return LoraAdapter(factors, digest)


def _check_modules(tensors: AdapterTensors, stacks: Iterable[StoredStack], layers: LoraLayers) -> None:
    """Check that the model has every module that the adapter changes."""
    unknown = sorted(
        module
        for module in tensors.modules - layers.modules - {stack.module for stack in stacks}
        if not layers.is_elsewhere(module)
    )
    if unknown:
        kinds = sorted({name.rpartition(".")[2] for name in layers.modules})
        others = f" and {len(unknown) - _MAX_LISTED} more" if len(unknown) > _MAX_LISTED else ""
        limit = "; see lora_target_modules" if layers.targets.names else ""
        raise ValueError(
            f"it changes {', '.join(unknown[:_MAX_LISTED])}{others}; adapters of this model may change its layers' "
            f"{', '.join(kinds)}{limit}"
        )


def _check_embeddings(tensors: AdapterTensors, layers: LoraLayers) -> None:
    """Check that embeddings are stored as such, and that their vocabulary and the head's is that of the model."""
    shapes = {}
    for layer in layers:
        for part in layer.parts if layer.stack is None else ():
            if part.name in tensors.modules and layer.is_embedding != (part.name in tensors.embeddings):
                kind = "an embedding" if layer.is_embedding else "a linear layer"
                raise ValueError(f"module {part.name} is {kind}, and its matrices are not those of {kind}")
            shapes[part.name] = part.shape[::-1] if layer.is_embedding else part.shape
    for (module, kind), shape in tensors.base_shapes.items():
        own = shapes.get(module)
        if layers.is_elsewhere(module):
            continue
        if own is None or shape != (own if kind == "weight" else own[:1]):
            raise ValueError(
                f"it has a {kind} of {module} of its own, of shape {list(shape)}; only the adapters of a model's "
                "weights are supported"
            )


def _check_tying(tensors: AdapterTensors) -> None:
    """Check that an adapter of the embedding is not also meant for the head, or the other way round."""
    both = tensors.embeddings, tensors.modules & {_HEAD}
    if any(both) and not all(both):
        (module, *_) = sorted(frozenset.union(*both))
        raise ValueError(
            f"ensure_weight_tying is True, and it changes {module} alone; the file must have the adapters of the "
            "embedding and of the head"
        )


def _read_part(
    tensors: AdapterTensors, part: WeightSlice, config: AdapterConfig, dtype: torch.dtype
) -> PartFactors | None:
    if part.name not in tensors.modules:
        return None
    rank, (out_features, in_features) = config.rank_of(part.name), part.shape
    tensors.check_shapes(part.name, (rank, in_features), (out_features, rank))
    (first_input, num_inputs), (first_output, num_outputs) = part.inputs, part.outputs
    a = tensors.read(part.name, "a", (0, first_input), (rank, num_inputs))
    b = tensors.read(part.name, "b", (first_output, 0), (num_outputs, rank))
    if part.interleaving is not None:
        b = b[part.interleaving.order(num_outputs)]
    scaled = b.T * config.scaling_of(part.name)
    return PartFactors(a.to(dtype), scaled.contiguous().to(dtype))


def _digest(folder: Path) -> str:
    """Return a digest of the adapter's files: of other ranks' nodes, and of a later time, they may differ."""
    digest = hashlib.sha256((folder / CONFIG_NAME).read_bytes())
    with (folder / WEIGHTS_NAME).open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
