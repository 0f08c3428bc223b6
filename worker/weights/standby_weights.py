"""StandbyWeights: the weights of one rank in memory that outlives its process, for processes that need the same ones.

These are the process that replaces the rank, and the rank of the same number of another replica.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...kernels.native.library import is_available
from ...kernels.native.packed_weights import panel_len
from ...proto.errors import in_one_line
from ..memory.shared_segment import SegmentAddress, SharedSegment
from .weight_segment import NoStore, SegmentReader, SegmentWriter, WeightStore
from .weight_source import WeightSource

# Files by which weights and configuration are recognized.
_PATTERNS = ("*.safetensors", "*.json")
# Upper bound of loaded weights per stored byte: 4 bits as float32 are 8 bytes, padding included. Of address space.
_MAX_EXPANSION = 16
_MIN_BYTES = 1 << 30

# Copies that may fail before the files are read: each may wait for a peer that hangs.
MAX_FAILED_COPIES = 2

# Owner of the segments of the process that this one replaces.
_REPLACED = "the rank that failed"

_log = logging.getLogger(__name__)


# Returns a copy of the segment with these weights, of which the second argument is the folder; None if that is not
# possible, or slower than to read the files.
CopySegment = Callable[[WeightSource, Mapping[str, Any], Path], SharedSegment | None]


class StandbyWeights:
    """The segments of a rank's weights, one per model; none if they are off.

    Args:
        sources: for the first load of each model: segments of the process that this one replaces, open elsewhere, and
            processes of other replicas.
        copy: copies a segment from a source of another host.
    """

    def __init__(
        self,
        sources: Sequence[SegmentAddress | WeightSource] = (),
        *,
        is_on: bool = True,
        copy: CopySegment = lambda source, identity, folder: None,
    ) -> None:
        self._is_on, self._copy = is_on, copy
        self._sources = [
            each if isinstance(each, WeightSource) else WeightSource(_REPLACED, (each,)) for each in sources
        ]
        self._used = set[str]()  # names of segments
        self._segments: list[SharedSegment] = []

    @property
    def addresses(self) -> tuple[SegmentAddress, ...]:
        """Return the segments of the models in use, open in this process."""
        return tuple(segment.address for segment in self._segments)

    @contextmanager
    def store(self, folder: Path, description: str) -> Iterator[WeightStore]:
        """Yield the store for a model while it loads: an inherited segment if it holds the model, or a new one.

        Args:
            folder: of the model's files.
            description: of everything else that the weights depend on.
        """
        if not self._is_on:
            yield NoStore()
            return
        identity = _identity(folder, description)
        store = self._find(identity, folder) or self._begin_segment(folder, identity)
        if store is None:
            yield NoStore()
            return
        try:
            yield store
        except BaseException:
            store.close()
            raise
        try:
            if _identity(folder, description) != identity:
                raise OSError(f"{folder} was changed while it was read")
            self._segments.append(store.finish())
        except OSError as error:
            store.close()
            _log.warning("a standby cannot map the weights: %s", error)

    def drop(self) -> None:
        """Close the segments: their memory is freed with the weights and with the other processes' descriptors."""
        self._sources.clear()
        while self._segments:
            self._segments.pop().close()

    def _find(self, identity: dict[str, Any], folder: Path) -> SegmentReader | None:
        """Return the weights of the first source that has them."""
        for source in self._sources:
            for address in source.segments:
                if address.name not in self._used and (reader := self._map(source, address, identity)):
                    self._used.add(address.name)
                    return reader
        num_failed = 0
        for number, source in enumerate(self._sources):
            if not source.credentials:
                continue
            if num_failed == MAX_FAILED_COPIES:
                _log.warning(
                    "the weights of %s and later ones are not asked for: reading files", source.owner
                )
                break
            num_failed += 1
            self._sources[number] = replace(source, credentials=source.credentials[1:])
            segment = self._copy(source, identity, folder)
            if segment is not None:
                try:
                    return _read_copy(segment, identity)
                except (OSError, ValueError) as error:
                    _log.warning("not using the weights of %s: %s", source.owner, in_one_line(error))
        return None

    def _map(
        self, source: WeightSource, address: SegmentAddress, identity: dict[str, Any]
    ) -> SegmentReader | None:
        is_replaced = source.owner == _REPLACED
        try:
            reader = SegmentReader(address, identity)
            if not is_replaced and _num_memory_nodes() > 1:
                with closing(reader):
                    reader = _read_copy(reader.segment.copy(), identity)
        except (OSError, ValueError) as error:
            level = logging.WARNING if is_replaced else logging.INFO
            _log.log(level, "not mapping the weights of %s: %s", source.owner, in_one_line(error))
            return None
        _log.info("mapped %.2f GB of weights of %s", address.num_bytes / 1e9, source.owner)
        return reader

    def _begin_segment(self, folder: Path, identity: dict[str, Any]) -> SegmentWriter | None:
        stored = sum(path.stat().st_size for path in folder.glob(_PATTERNS[0]))
        try:
            return SegmentWriter(identity, _MAX_EXPANSION * stored + _MIN_BYTES)
        except OSError as error:
            _log.warning("a standby cannot map the weights: no shared memory: %s", error)
            return None


def _identity(folder: Path, description: str) -> dict[str, Any]:
    """Return the identity of weights as JSON values: of files, settings and the processor's layout."""
    files = [
        [path.name, (stat := path.stat()).st_size, stat.st_mtime_ns]
        for pattern in _PATTERNS
        for path in sorted(folder.glob(pattern))
    ]
    return {
        "folder": str(folder.resolve()),
        "files": files,
        "settings": description,
        "layout": [torch.__version__, panel_len() if is_available() else 0],
    }


def _read_copy(segment: SharedSegment, identity: Mapping[str, Any]) -> SegmentReader:
    """Return the reader of a segment that was copied, after comparing its tensors with their checksums."""
    with closing(segment):
        reader = SegmentReader(segment.address, identity)
    try:
        reader.check_content()
    except ValueError:
        reader.close()
        raise
    return reader


def _num_memory_nodes() -> int:
    """Return the nodes of this host's memory, of which each processor reads its own fastest."""
    try:
        names = os.listdir("/sys/devices/system/node")
    except OSError:
        return 1
    return sum(name.removeprefix("node").isdigit() for name in names)
