"""StandbyWeights: the weights of one rank in memory that outlives its process, for the process that replaces it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...kernels.native.library import is_available
from ...kernels.native.packed_weights import panel_len
from ...proto.errors import in_one_line
from ..memory.shared_segment import SegmentAddress, SharedSegment
from .weight_segment import NoStore, SegmentReader, SegmentWriter, WeightStore

# Files by which weights and configuration are recognized.
_PATTERNS = ("*.safetensors", "*.json")
# Upper bound of loaded weights per stored byte: 4 bits as float32 are 8 bytes, padding included. Of address space.
_MAX_EXPANSION = 16
_MIN_BYTES = 1 << 30

_log = logging.getLogger(__name__)


class StandbyWeights:
    """The segments of a rank's weights, one per model; none if they are off.

    Args:
        addresses: segments of the process that this one replaces, for the first load of each model; open elsewhere.
    """

    def __init__(self, addresses: Sequence[SegmentAddress] = (), *, is_on: bool = True) -> None:
        self._is_on = is_on
        self._inherited = list(addresses)
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
        store = self._find_inherited(identity) or self._begin_segment(folder, identity)
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
        self._inherited.clear()
        while self._segments:
            self._segments.pop().close()

    def _find_inherited(self, identity: dict[str, Any]) -> SegmentReader | None:
        for address in self._inherited:
            try:
                reader = SegmentReader(address, identity)
            except (OSError, ValueError) as error:
                _log.warning("not mapping the weights of the rank that failed: %s", in_one_line(error))
                continue
            self._inherited.remove(address)
            _log.info("mapped %.2f GB of weights of the rank that failed", address.num_bytes / 1e9)
            return reader
        return None

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
