"""Checkpoint: the tensors of a model directory in safetensors files, of which each rank reads only its slices."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...proto.errors import ModelLoadError
from .device_writer import DeviceWriter
from .safetensors_file import SafetensorsFile, StoredTensor

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

# Stored in some checkpoints, but ignored: quire computes these constants.
_COMPUTED_SUFFIXES = ("rotary_emb.inv_freq", ".k_scale", ".v_scale", ".attn.bias", ".attn.masked_bias")

# Ends of the names of matrices, plain or quantized.
_MATRIX_SUFFIXES = ("weight", "qweight", "weight_packed")

CPU = torch.device("cpu")
# Threads that read to memory; they are started when there are large tensors.
MAX_READERS = min(8, os.cpu_count() or 1)

ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Alias:
    """A matrix that is part of a stored tensor.

    Attributes:
        stored_shape: expected shape of the stored tensor.
        index: of the matrix in the first dimension of a stored tensor of three dimensions.
        start, length: rows of the matrix.
        transposed: the rows of the matrix are stored as columns.
    """

    stored: str
    stored_shape: tuple[int, ...]
    index: int = 0
    start: int = 0
    length: int = 0
    transposed: bool = False


class Checkpoint:
    """The tensors of a model directory by name. The constructor reads only the headers of the files.

    Args:
        folder: has model.safetensors, or model.safetensors.index.json and the files that it lists.
        on_progress: called with the bytes that this rank has read and the expected total. The total is an estimate:
            this rank's share of each tensor of two or more dimensions, and all of the others. The last call has the
            exact total.
        num_ranks: ranks that share the tensors.

    Attributes:
        num_bytes_read: bytes read so far.
        reading_s: seconds that it took.

    Raises:
        ModelLoadError: there are no weights, or a file is missing, truncated or malformed; names the file.
    """

    def __init__(
        self, folder: str | Path, on_progress: ProgressCallback | None = None, num_ranks: int = 1
    ) -> None:
        self._folder = Path(folder)
        self._writer: DeviceWriter | None = None
        self._readers = ThreadPoolExecutor(MAX_READERS, thread_name_prefix="weights")
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
        self.num_bytes_read, self.reading_s = 0, 0.0

    def close(self) -> None:
        """Close the files, and free the buffers for a GPU. Safe to call twice."""
        self._readers.shutdown(cancel_futures=True)
        if self._writer is not None:
            self._writer.close()
        for file in self._files.values():
            file.close()

    def digest(self) -> int:
        """Return a signed 64-bit digest of the files by samples of them: equal for equal weights."""
        samples = hashlib.blake2b(digest_size=8)
        for _, file in sorted(self._files.items()):
            samples.update(file.sample())
        return int.from_bytes(samples.digest(), signed=True)

    def has(self, name: str) -> bool:
        """Return whether a stored tensor or an alias has this name."""
        return name in self._file_of or name in self._aliases

    def has_layer(self, name: str) -> bool:
        """Return whether the matrix of a linear layer of this name is stored, plain or quantized."""
        return any(self.has(f"{name}.{suffix}") for suffix in _MATRIX_SUFFIXES)

    def names(self) -> list[str]:
        """Return the names of all stored tensors."""
        return list(self._file_of)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, or of a matrix of a stack.

        Raises:
            ModelLoadError: there is none of this name.
        """
        stored, alias = self._find(name).shape, self._aliases.get(name)
        if alias is None or len(stored) < 3:
            return stored
        return (alias.length, stored[1]) if alias.transposed else (alias.length, *stored[2:])

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the stored dtype of a tensor. Raises ModelLoadError if there is none of this name."""
        return self._find(name).dtype

    def ignore(self, name: str) -> None:
        """Accept that a tensor is not read; there may be none of this name."""
        self._unread.discard(name)

    def ignore_all(self) -> None:
        """Accept that tensors are not read: the weights come from elsewhere."""
        self._unread.clear()

    def ignore_if_zero(self, name: str) -> None:
        """Accept that a tensor is not read if all of its elements are 0; there may be none of this name."""
        if name in self._file_of and self.read(name, self.shape_of(name)).any():
            self._unread.add(name)

    def rename(self, stored: str, name: str) -> None:
        """Give a stored tensor another name."""
        file_name = self._file_of.pop(stored)
        tensors = self._files[file_name].tensors
        tensors[name] = tensors.pop(stored)
        self._file_of[name] = file_name
        if stored in self._unread:
            self._unread.remove(stored)
            self._unread.add(name)

    def alias_rows(
        self,
        name: str,
        stored: str,
        stored_shape: tuple[int, ...],
        index: int,
        start: int,
        length: int,
        *,
        transposed: bool = False,
    ) -> None:
        """Name `length` rows from `start` on of matrix `index` in a stored stack of matrices.

        Args:
            stored_shape: a matrix may have more than two dimensions.
            transposed: the rows are stored as columns.
        """
        self._aliases[name] = _Alias(stored, stored_shape, index, start, length, transposed)

    def alias_transpose(self, name: str, stored_shape: tuple[int, int]) -> None:
        """Make reads of a stored matrix return its transpose."""
        self._aliases[name] = _Alias(name, stored_shape, transposed=True)

    def read_into(self, out: Tensor, name: str, shape: tuple[int, ...], dim: int = 0, start: int = 0) -> None:
        """Copy a slice of a tensor into `out`, converted to the dtype and device of `out`.

        Args:
            out: has the slice's length in dimension `dim` and the tensor's in the others.
            shape: expected shape of the whole tensor.
            dim, start: the slice begins at `start` of dimension `dim`.

        Raises:
            ModelLoadError: the tensor is missing or has another shape.
        """
        self._read(out, name, shape, [start if axis == dim else 0 for axis in range(len(shape))])

    def read(
        self, name: str, shape: tuple[int, ...], *ranges: tuple[int, int], device: torch.device = CPU
    ) -> Tensor:
        """Return a slice of a tensor in its stored dtype.

        Args:
            shape: expected shape of the whole tensor.
            ranges: start and length of the slice in the first dimensions; it has all of the others.
            device: of the result.

        Raises:
            ModelLoadError: the tensor is missing or has another shape.
        """
        box = [*ranges, *((0, length) for length in shape[len(ranges) :])]
        out = torch.empty([length for _, length in box], dtype=self.dtype_of(name), device=device)
        self._read(out, name, shape, [start for start, _ in box])
        return out

    def check_all_read(self, ignoring: Iterable[str] = ()) -> None:
        """Check that all tensors were read, which shows that the model definition matches the checkpoint.

        Raises:
            ModelLoadError: tensors were not read; names them.
        """
        unread = {name for name in self._unread.difference(ignoring) if not name.endswith(_COMPUTED_SUFFIXES)}
        if unread:
            some = ", ".join(sorted(unread)[:5])
            raise ModelLoadError(
                f"{self._folder} has {len(unread)} tensors that the model does not use: {some}"
            )
        if self._on_progress is not None:
            self._on_progress(self.num_bytes_read, self.num_bytes_read)

    def _read(self, out: Tensor, name: str, shape: tuple[int, ...], starts: list[int]) -> None:
        alias = self._aliases.get(name)
        if alias is None:
            self._read_stored(out, name, shape, starts)
        elif alias.transposed and len(alias.stored_shape) == 3:
            starts = [alias.index, starts[1], alias.start + starts[0]]
            self._read_stored(out.t().unsqueeze(0), alias.stored, alias.stored_shape, starts)
        elif alias.transposed:
            self._read_stored(out.t(), alias.stored, alias.stored_shape, starts[::-1])
        else:
            assert shape[0] == alias.length, f"{name!r} is an alias of {alias.length} rows, not {shape[0]}"
            starts = [alias.index, alias.start + starts[0], *starts[1:]]
            self._read_stored(out.unsqueeze(0), alias.stored, alias.stored_shape, starts)

    def _read_stored(self, out: Tensor, name: str, shape: tuple[int, ...], starts: list[int]) -> None:
        if name not in self._file_of:
            raise ModelLoadError(f"{self._folder} has no tensor {name!r}, expected with shape {list(shape)}")
        found, file_name = self._find(name).shape, self._file_of[name]
        if found != shape:
            raise ModelLoadError(f"{name!r} in {file_name} has shape {list(found)}, expected {list(shape)}")
        started = time.monotonic()
        try:
            self.num_bytes_read += self._files[file_name].read_into(
                out, name, starts, self._writer_for(out), self._readers
            )
        except (OSError, ValueError) as error:
            raise _read_error(self._folder / file_name, error) from error
        self.reading_s += time.monotonic() - started
        self._unread.discard(name)
        if self._on_progress is not None:
            self._on_progress(min(self.num_bytes_read, self._num_bytes_expected), self._num_bytes_expected)

    def _writer_for(self, out: Tensor) -> DeviceWriter | None:
        if out.is_cuda and self._writer is None:
            self._writer = DeviceWriter()
        return self._writer if out.is_cuda else None

    def _find(self, name: str) -> StoredTensor:
        stored = self._aliases[name].stored if name in self._aliases else name
        if stored not in self._file_of:
            raise ModelLoadError(f"{self._folder} has no tensor {stored!r}")
        return self._files[self._file_of[stored]].tensors[stored]

    def _locate_tensors(self) -> dict[str, str]:
        """Open all files; return tensor name |-> file name."""
        if (self._folder / SINGLE_FILE).is_file():
            return dict.fromkeys(self._open(SINGLE_FILE), SINGLE_FILE)
        index_path = self._folder / INDEX_FILE
        if not index_path.is_file():
            raise ModelLoadError(f"{self._folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")
        file_of = _read_index(index_path)
        for file_name in sorted(set(file_of.values())):
            stored = set(self._open(file_name))
            listed = {name for name, listed_in in file_of.items() if listed_in == file_name}
            if missing := sorted(listed - stored):
                raise ModelLoadError(
                    f"{self._folder / file_name} has no tensor {missing[0]!r}, but {INDEX_FILE} lists it there"
                )
        return file_of

    def _open(self, file_name: str) -> list[str]:
        path = self._folder / file_name
        try:
            self._files[file_name] = SafetensorsFile(path)
        except (OSError, ValueError) as error:
            raise _read_error(path, error) from error
        return list(self._files[file_name].tensors)


def _share(tensor: StoredTensor, num_ranks: int) -> int:
    return tensor.num_bytes // num_ranks if len(tensor.shape) > 1 else tensor.num_bytes


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        file_of = {str(name): str(file_name) for name, file_name in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    outside = sorted(name for name in set(file_of.values()) if name != Path(name).name)
    if outside:
        raise ModelLoadError(f"{path} lists a file outside its folder: {outside[0]!r}")
    return file_of


def _read_error(path: Path, error: Exception) -> ModelLoadError:
    return ModelLoadError(f"{path} cannot be read (truncated or damaged?): {error}")
