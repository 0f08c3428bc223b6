"""Reading a checkpoint: safetensors only, tensor by tensor, each rank no more than its slices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...proto.errors import ModelLoadError
from .safetensors_file import SafetensorsFile, StoredTensor

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

# Constants that some checkpoints carry and that are computed instead, from the configuration or as they are needed.
_COMPUTED_SUFFIXES = ("rotary_emb.inv_freq", ".k_scale", ".v_scale")

ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Alias:
    """A matrix that lies within a stored tensor.

    Attributes:
        stored_shape: what the stored tensor must have.
        index: of the matrix in the stored tensor's first dimension, where that has three.
        start, length: its rows.
        transposed: it is stored with its rows as columns.
    """

    stored: str
    stored_shape: tuple[int, ...]
    index: int = 0
    start: int = 0
    length: int = 0
    transposed: bool = False


class Checkpoint:
    """The tensors of a model directory by name. Reads nothing but headers until asked.

    Args:
        folder: has model.safetensors, or model.safetensors.index.json and the files that it names.
        on_progress: called with bytes that this rank has read and bytes that it will read in all. Those are
            estimated, as a rank's part of every tensor of two dimensions and more and the whole of the others;
            the last call says how many they were.
        num_ranks: that share the tensors.

    Attributes:
        num_bytes_read: so far.

    Raises:
        ModelLoadError: no weights, or a file that is missing, truncated or malformed; names it.
    """

    def __init__(
        self, folder: str | Path, on_progress: ProgressCallback | None = None, num_ranks: int = 1
    ) -> None:
        self._folder = Path(folder)
        self._files: dict[str, SafetensorsFile] = {}
        try:
            self._file_of = self._locate_tensors()
        except BaseException:
            self.close()
            raise
        self._aliases: dict[str, _Alias] = {}
        self._unread = set(self._file_of)
        self._on_progress = on_progress
        self._num_bytes_expected = sum(
            _share(tensor, num_ranks) for file in self._files.values() for tensor in file.tensors.values()
        )
        self.num_bytes_read = 0

    def close(self) -> None:
        """Closes the files; nothing can be read afterwards. Safe to call twice."""
        for file in self._files.values():
            file.close()

    def has(self, name: str) -> bool:
        """Whether there is such a tensor, or one was given that name."""
        return name in self._file_of or name in self._aliases

    def names(self) -> list[str]:
        """All that is stored."""
        return list(self._file_of)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Of a stored tensor. Raises ModelLoadError if there is none of that name."""
        return self._find(name).shape

    def dtype_of(self, name: str) -> torch.dtype:
        """In which a tensor is stored. Raises ModelLoadError if there is none of that name."""
        return self._find(name).dtype

    def drop(self, name: str) -> None:
        """Says that the model has no use for a tensor, should there be one of that name."""
        self._unread.discard(name)

    def drop_if_zero(self, name: str) -> None:
        """Likewise, unless it holds something."""
        if name in self._file_of and self.read(name, self.shape_of(name)).any():
            self._unread.add(name)

    def rename(self, stored: str, name: str) -> None:
        """Has a stored tensor known by another name from now on."""
        file_name = self._file_of.pop(stored)
        tensors = self._files[file_name].tensors
        tensors[name] = tensors.pop(stored)
        self._file_of[name] = file_name
        self._unread.remove(stored)
        self._unread.add(name)

    def name_part(
        self, name: str, stored: str, stored_shape: tuple[int, int, int], index: int, start: int, length: int
    ) -> None:
        """Gives rows of one matrix of a stack of matrices a name of their own."""
        self._aliases[name] = _Alias(stored, stored_shape, index, start, length)

    def transpose(self, name: str, stored_shape: tuple[int, int]) -> None:
        """Has a stored matrix read as its transpose from now on."""
        self._aliases[name] = _Alias(name, stored_shape, transposed=True)

    def read_into(self, out: Tensor, name: str, shape: tuple[int, ...], dim: int = 0, start: int = 0) -> None:
        """Copies a part of a tensor into `out`, converting to its dtype and device.

        Args:
            out: as long as the part in dimension `dim`, and as the whole tensor in the others.
            shape: what the whole tensor must have.
            dim, start: the part begins at `start` of dimension `dim`.

        Raises:
            ModelLoadError: no such tensor, or one of another shape.
        """
        self._read(out, name, shape, [start if axis == dim else 0 for axis in range(len(shape))])

    def read(self, name: str, shape: tuple[int, ...], *ranges: tuple[int, int]) -> Tensor:
        """A part of a tensor, in the dtype that it is stored in.

        Args:
            shape: what the whole tensor must have.
            ranges: start and length in the first dimensions; all of the others.

        Raises:
            ModelLoadError: no such tensor, or one of another shape.
        """
        boxed = [*ranges, *((0, length) for length in shape[len(ranges) :])]
        out = torch.empty([length for _, length in boxed], dtype=self.dtype_of(name))
        self._read(out, name, shape, [start for start, _ in boxed])
        return out

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
            self._on_progress(self.num_bytes_read, self.num_bytes_read)

    def _read(self, out: Tensor, name: str, shape: tuple[int, ...], starts: list[int]) -> None:
        alias = self._aliases.get(name)
        if alias is None:
            self._read_stored(out, name, shape, starts)
        elif alias.transposed:
            self._read_stored(out.t(), alias.stored, alias.stored_shape, starts[::-1])
        else:
            assert shape[0] == alias.length, f"{name!r} was named with {alias.length} rows"
            starts = [alias.index, alias.start + starts[0], *starts[1:]]
            self._read_stored(out.unsqueeze(0), alias.stored, alias.stored_shape, starts)

    def _read_stored(self, out: Tensor, name: str, shape: tuple[int, ...], starts: list[int]) -> None:
        if name not in self._file_of:
            raise ModelLoadError(f"{self._folder} has no tensor {name!r}, expected with shape {list(shape)}")
        found, file_name = self.shape_of(name), self._file_of[name]
        if found != shape:
            raise ModelLoadError(f"{name!r} in {file_name} has shape {list(found)}, expected {list(shape)}")
        try:
            self.num_bytes_read += self._files[file_name].read_into(out, name, starts)
        except (OSError, ValueError) as error:
            raise _unreadable(self._folder / file_name, error) from error
        self._unread.discard(name)
        if self._on_progress is not None:
            self._on_progress(min(self.num_bytes_read, self._num_bytes_expected), self._num_bytes_expected)

    def _find(self, name: str) -> StoredTensor:
        stored = self._aliases[name].stored if name in self._aliases else name
        if stored not in self._file_of:
            raise ModelLoadError(f"{self._folder} has no tensor {stored!r}")
        return self._files[self._file_of[stored]].tensors[stored]

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
            self._files[file_name] = SafetensorsFile(path)
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        return list(self._files[file_name].tensors)


def _share(tensor: StoredTensor, num_ranks: int) -> int:
    return tensor.num_bytes // num_ranks if len(tensor.shape) > 1 else tensor.num_bytes


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
