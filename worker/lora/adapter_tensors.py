"""AdapterTensors: the matrices of an adapter's file, by module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..weights.safetensors_file import SafetensorsFile, StoredTensor
from .adapter_config import WEIGHTS_NAME

_PREFIX = "base_model.model."
# Ends of names |-> matrix, of linear layers and of embeddings.
_LINEAR = {".lora_A.weight": "a", ".lora_B.weight": "b"}
_EMBEDDING = {".lora_embedding_A": "a", ".lora_embedding_B": "b"}
# PEFT stores the model's own weight of the embedding and of the head beside their adapters, and the head's bias.
_BASE = (".base_layer.weight", ".base_layer.bias")


class AdapterTensors:
    """The matrices A [R, K] and B [N, R] of each module that an adapter changes.

    Attributes:
        base_shapes: (module, ``weight`` or ``bias``) |-> shape of the model's own one, which the file has besides.

    Raises:
        ValueError: the file has other tensors, or one matrix of a module without the other.
    """

    def __init__(self, file: SafetensorsFile) -> None:
        self._file = file
        stored = {name: each for name, each in file.tensors.items() if not name.endswith(_BASE)}
        self._names = _find_matrices(stored)
        for module, names in self._names.items():
            if len(names) < 2:
                raise ValueError(
                    f"module {module} has {next(iter(names.values()))!r} alone, without its partner"
                )
        self.base_shapes: dict[tuple[str, str], tuple[int, ...]] = {}
        for name in sorted(file.tensors.keys() - stored.keys()):
            module, _, kind = name.removeprefix(_PREFIX).rsplit(".", 2)
            self.base_shapes[module, kind] = file.tensors[name].shape

    @property
    def modules(self) -> frozenset[str]:
        """Return the modules that the adapter changes."""
        return frozenset(self._names)

    @property
    def embeddings(self) -> frozenset[str]:
        """Return those of the modules that are embeddings."""
        return frozenset(
            module for module, names in self._names.items() if names["a"].endswith(tuple(_EMBEDDING))
        )

    def rename(self, module: str, name: str) -> None:
        """Give a module the name that the model has for it."""
        self._names[name] = self._names.pop(module)

    def shape(self, module: str, matrix: str) -> tuple[int, ...]:
        """Return the shape of matrix ``a`` or ``b``."""
        return self._file.tensors[self._names[module][matrix]].shape

    def check_shapes(self, module: str, a: tuple[int, int], b: tuple[int, int]) -> None:
        """Raise ValueError if a module's matrices have other shapes."""
        for matrix, shape in (("a", a), ("b", b)):
            if self.shape(module, matrix) != shape:
                name, actual = self._names[module][matrix], list(self.shape(module, matrix))
                raise ValueError(f"tensor {name!r} has shape {actual}, must have {list(shape)}")

    def read(self, module: str, matrix: str, starts: Sequence[int], shape: tuple[int, int]) -> Tensor:
        """Return a box of a matrix, in float32.

        Raises:
            ValueError: it has elements that are not finite.
        """
        name, out = self._names[module][matrix], torch.empty(shape, dtype=torch.float32)
        self._file.read_into(out, name, starts)
        if not out.isfinite().all():
            raise ValueError(f"tensor {name!r} has numbers that are not finite")
        return out


def _find_matrices(tensors: Mapping[str, StoredTensor]) -> dict[str, dict[str, str]]:
    """Return module |-> {"a": name, "b": name}."""
    found: dict[str, dict[str, str]] = {}
    suffixes = _LINEAR | _EMBEDDING
    for name, tensor in tensors.items():
        suffix = next((suffix for suffix in suffixes if name.endswith(suffix)), None)
        if suffix is None or not name.startswith(_PREFIX):
            raise ValueError(f"tensor {name!r} is not a matrix of an adapter")
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"tensor {name!r} has dtype {tensor.dtype}, must be a floating-point type")
        module = name.removeprefix(_PREFIX).removesuffix(suffix)
        found.setdefault(module, {})[suffixes[suffix]] = name
    if not found:
        raise ValueError(f"{WEIGHTS_NAME} has no tensors")
    return found
