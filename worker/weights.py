"""Reading a checkpoint: safetensors only, tensor by tensor, each rank no more than its slices."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..proto.errors import ModelLoadError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

# Constants that some checkpoints carry and that are computed from the configuration instead.
_COMPUTED_SUFFIXES = ("rotary_emb.inv_freq",)

ProgressCallback = Callable[[int, int], None]


class Checkpoint:
    """The tensors of a model directory by name. Reads nothing but headers until asked.

    Args:
        folder: has model.safetensors, or model.safetensors.index.json and the files that it names.
        on_progress: called with bytes done and bytes in all as tensors are read; a tensor of which this rank
            needs a slice counts in full, so that every rank ends at the same number.

    Raises:
        ModelLoadError: no weights, or a file that is missing, truncated or malformed; names it.
    """

    def __init__(self, folder: str | Path, on_progress: ProgressCallback | None = None) -> None:
        self._folder = Path(folder)
        self._files: dict[str, Any] = {}
        self._file_of = self._locate_tensors()
        self._unread = set(self._file_of)
        self._on_progress = on_progress
        self._num_bytes = sum((self._folder / name).stat().st_size for name in self._files)
        self._num_bytes_read = 0

    def read_into(self, out: Tensor, name: str, shape: tuple[int, ...], dim: int = 0, start: int = 0) -> None:
        """Copies a part of a tensor into `out`, converting to its dtype and device.

        Args:
            out: as long as the part in dimension `dim`, and as the whole tensor in the others.
            shape: what the whole tensor must have.
            dim, start: the part begins at `start` of dimension `dim`.

        Raises:
            ModelLoadError: no such tensor, or one of another shape.
        """
        if name not in self._file_of:
            raise ModelLoadError(f"{self._folder} has no tensor {name!r}, expected with shape {list(shape)}")
        file_name = self._file_of[name]
        try:
            tensor_slice = self._files[file_name].get_slice(name)
            found = tuple(tensor_slice.get_shape())
            if found != shape:
                raise ModelLoadError(
                    f"{name!r} in {file_name} has shape {list(found)}, expected {list(shape)}"
                )
            index = (slice(None),) * dim + (slice(start, start + out.shape[dim]),)
            part: Tensor = tensor_slice[index]
            out.copy_(part)
        except (SafetensorError, OSError) as error:
            raise _unreadable(self._folder / file_name, error) from error
        self._unread.discard(name)
        self._report(math.prod(found) * part.element_size())

    def expect_all_read(self, ignoring: Iterable[str] = ()) -> None:
        """Call at the end: a tensor that nothing asked for means that the model was misunderstood.

        Raises:
            ModelLoadError: names the tensors left over.
        """
        left = {name for name in self._unread.difference(ignoring) if not name.endswith(_COMPUTED_SUFFIXES)}
        if left:
            some = ", ".join(sorted(left)[:5])
            raise ModelLoadError(
                f"{self._folder} has {len(left)} tensors that the model has no use for: {some}"
            )
        if self._on_progress is not None:
            self._on_progress(self._num_bytes, self._num_bytes)

    def _locate_tensors(self) -> dict[str, str]:
        """Tensor name |-> file name; opens all files."""
        if (self._folder / SINGLE_FILE).is_file():
            return dict.fromkeys(self._open(SINGLE_FILE), SINGLE_FILE)
        index_path = self._folder / INDEX_FILE
        if not index_path.is_file():
            raise ModelLoadError(f"{self._folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")
        file_of = _read_index(index_path)
        for file_name in sorted(set(file_of.values())):
            held = set(self._open(file_name))
            absent = sorted(name for name, home in file_of.items() if home == file_name and name not in held)
            if absent:
                raise ModelLoadError(
                    f"{self._folder / file_name} lacks {absent[0]!r}, which {INDEX_FILE} puts there"
                )
        return file_of

    def _open(self, file_name: str) -> list[str]:
        path = self._folder / file_name
        try:
            file: Any = safe_open(path, framework="pt")
            self._files[file_name] = file
            names: list[str] = list(file.keys())
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error
        return names

    def _report(self, num_bytes: int) -> None:
        if self._on_progress is not None:
            self._num_bytes_read += num_bytes
            self._on_progress(min(self._num_bytes_read, self._num_bytes), self._num_bytes)


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        file_of = {str(name): str(file_name) for name, file_name in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    strays = sorted(name for name in set(file_of.values()) if name != Path(name).name)
    if strays:
        raise ModelLoadError(f"{path} names a file outside its folder: {strays[0]!r}")
    return file_of


def _unreadable(path: Path, error: Exception) -> ModelLoadError:
    return ModelLoadError(f"{path} cannot be read (truncated or damaged?): {error}")
