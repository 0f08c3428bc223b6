"""Comparison of the tensors of two model directories."""

from __future__ import annotations

from contextlib import closing

from ...proto.errors import ModelLoadError
from .checkpoint import Checkpoint

_MAX_SHOWN = 3


def check_same_layout(folder: str, other: str, optional: tuple[str, ...] = ()) -> None:
    """Check that two directories store tensors of the same names, shapes and types. Reads no weights.

    Args:
        optional: tensors whose names begin with one of these may be in one directory alone.

    Raises:
        ModelLoadError: they differ, or a directory has no weights that can be read.
    """
    expected, found = _layout(folder), _layout(other)
    names = sorted(name for name in expected.keys() ^ found.keys() if not name.startswith(optional))
    if names:
        shown = ", ".join(names[:_MAX_SHOWN])
        raise ModelLoadError(f"{other}: {len(names)} tensors are missing or more than the model has: {shown}")
    for name in sorted(expected.keys() & found.keys()):
        if found[name] != expected[name]:
            raise ModelLoadError(f"{other}: {name} is {found[name]}, must be {expected[name]}")


def has_tensors(folder: str, prefixes: tuple[str, ...]) -> bool:
    """Return whether a directory stores tensors whose names begin with one of the prefixes.

    Raises:
        ModelLoadError: the directory has no weights that can be read.
    """
    return any(name.startswith(prefixes) for name in _layout(folder))


def _layout(folder: str) -> dict[str, str]:
    """Return name |-> type and shape of each tensor."""
    with closing(Checkpoint(folder)) as checkpoint:
        return {
            name: f"{checkpoint.dtype_of(name)} {list(checkpoint.shape_of(name))}"
            for name in checkpoint.names()
        }
