"""Comparison of the tensors of two model directories."""

from __future__ import annotations

from contextlib import closing

from ...proto.errors import ModelLoadError
from .checkpoint import Checkpoint

_MAX_SHOWN = 3


def check_same_layout(folder: str, other: str) -> None:
    """Check that two directories store tensors of the same names, shapes and types. Reads no weights.

    Raises:
        ModelLoadError: they differ, or a directory has no weights that can be read.
    """
    expected, found = _layout(folder), _layout(other)
    if expected.keys() != found.keys():
        names = sorted(expected.keys() ^ found.keys())
        shown = ", ".join(names[:_MAX_SHOWN])
        raise ModelLoadError(f"{other}: {len(names)} tensors are missing or more than the model has: {shown}")
    for name, layout in expected.items():
        if found[name] != layout:
            raise ModelLoadError(f"{other}: {name} is {found[name]}, must be {layout}")


def _layout(folder: str) -> dict[str, str]:
    """Return name |-> type and shape of each tensor."""
    with closing(Checkpoint(folder)) as checkpoint:
        return {
            name: f"{checkpoint.dtype_of(name)} {list(checkpoint.shape_of(name))}"
            for name in checkpoint.names()
        }
