"""NodeCache: copies of weights on a node's own disk, for model directories on slow shared storage.

The variable QUIRE_WEIGHTS_CACHE of a node names the folder; without it, weights are read where they are.
QUIRE_WEIGHTS_CACHE_GB bounds the copies; without it, the disk does. A model is copied once per node, by the first of
the processes that load it, while the others wait; what other nodes have of it comes from them (`node_copy`). If the
copy fails, the weights are read at their source, with a warning.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ...proto.errors import ConfigError, in_one_line
from .node_copy import Connect, CopyFailed, NodeCopy, read_piece, weight_files
from .weight_source import NO_PEERS, NodePeers

FOLDER_VARIABLE = "QUIRE_WEIGHTS_CACHE"
SIZE_VARIABLE = "QUIRE_WEIGHTS_CACHE_GB"
# In the format of sha256sum, which can check a copy later.
CHECKSUMS = "SHA256SUMS"
# A copy that was used within this time may be read at this moment: a replica has half an hour to load.
IN_USE_S = 3600.0
_KEY = re.compile("[0-9a-f]{16}")

_log = logging.getLogger(__name__)


def _connect_none(peer: object) -> NoReturn:
    raise ConnectionError("this process has no connections to other nodes")


@dataclass(frozen=True, slots=True)
class NodeCache:
    """A folder of copies. Any number of processes may use it at once.

    Attributes:
        folder: has a subfolder per copy, and lock files.
        max_bytes: of all copies; None for the whole disk.
    """

    folder: Path
    max_bytes: int | None = None

    @staticmethod
    def of_environment(variables: Mapping[str, str] = os.environ) -> NodeCache | None:
        """Return the cache of this node; None if it has none.

        Raises:
            ConfigError: the size is not a positive number.
        """
        if not (folder := variables.get(FOLDER_VARIABLE)):
            return None
        size = variables.get(SIZE_VARIABLE)
        try:
            max_bytes = None if not size else round(float(size) * 1e9)
        except (ValueError, OverflowError):
            max_bytes = 0
        if max_bytes is not None and max_bytes <= 0:
            raise ConfigError(f"{SIZE_VARIABLE} is {size!r}, must be a positive number of gigabytes")
        return NodeCache(Path(folder).expanduser(), max_bytes)

    def copy_of(self, source: Path, peers: NodePeers = NO_PEERS, connect: Connect = _connect_none) -> Path:
        """Return the folder to read a model directory's weights from: the copy, or the source if there is none.

        Returns at once if the copy exists. Copies are found by the source's path and its files' names, sizes and
        times, so that changed weights are copied again.

        Args:
            peers: have copies, or fill them.
            connect: opens a connection to a peer.
        """
        try:
            return self._copy_of(source, peers, connect)
        except (OSError, CopyFailed) as error:
            _log.warning(
                "%s is read in place, without a copy in %s: %s", source, self.folder, in_one_line(error)
            )
            return source

    def read_piece(self, key: str, piece: int) -> tuple[int, bytes] | None:
        """Return the checksum and the content of a piece of a copy, complete or not; None if it is not there yet.

        Raises:
            ValueError: there is no such key or piece.
        """
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is no key of a copy")
        # In this order: a copy is renamed when it is complete.
        for path in (*self.folder.glob(f".*-{key}.incoming"), *self.folder.glob(f"*-{key}")):
            if found := read_piece(path, piece):
                return found
        return None

    def _copy_of(self, source: Path, peers: NodePeers, connect: Connect) -> Path:
        files = weight_files(source)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not files or _device_of(source) == _device_of(self.folder):
            return source
        key = _key(source, files)
        entry = self.folder / f"{source.resolve().name}-{key}"
        if not _use(entry):
            with _locked(self.folder / f".{entry.name}.lock"):
                # Another process may have made it meanwhile.
                if not _use(entry):
                    self._make_room(sum(files.values()))
                    _fill(entry, source, files, key, peers, connect)
        return entry

    def _make_room(self, num_bytes: int) -> None:
        """Delete the copies that were not used for the longest time until there is room for more."""
        with _locked(self.folder / ".eviction.lock"):
            self._delete_remains()
            copies = sorted(self._copies(), key=_last_use)
            held = sum(map(_size_of, copies))
            limit = held + shutil.disk_usage(self.folder).free
            if self.max_bytes is not None:
                limit = min(limit, self.max_bytes)
            for copy in copies:
                if held + num_bytes <= limit or time.time() - _last_use(copy) < IN_USE_S:
                    break
                held -= _size_of(copy)
                shutil.rmtree(copy)
                _log.info("deleted the copy %s, the least recently used", copy)
            if held + num_bytes > limit:
                raise CopyFailed(
                    f"{num_bytes / 1e9:.1f} GB are needed, {max(0, limit - held) / 1e9:.1f} GB can be freed"
                )

    def _copies(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if path.is_dir() and not path.name.startswith(".")]

    def _delete_remains(self) -> None:
        """Delete what processes left that died while they copied."""
        for incoming in self.folder.glob(".*.incoming"):
            with _locked(incoming.with_suffix(".lock"), wait=False) as is_locked:
                if is_locked:
                    shutil.rmtree(incoming, ignore_errors=True)


def weights_folder(model_path: str, peers: NodePeers = NO_PEERS, connect: Connect = _connect_none) -> Path:
    """Return the folder to read the weights of a model directory from, on this node; see `NodeCache.copy_of`."""
    cache = NodeCache.of_environment()
    return Path(model_path) if cache is None else cache.copy_of(Path(model_path), peers, connect)


def _key(source: Path, files: Mapping[str, int]) -> str:
    times = [(name, num_bytes, (source / name).stat().st_mtime_ns) for name, num_bytes in files.items()]
    identity = json.dumps([str(source.resolve()), times])
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def _device_of(path: Path) -> int:
    return path.stat().st_dev


def _last_use(entry: Path) -> float:
    return (entry / CHECKSUMS).stat().st_mtime


def _size_of(entry: Path) -> int:
    return sum(path.stat().st_size for path in entry.iterdir())


def _use(entry: Path) -> bool:
    """Return whether the copy exists, after recording the use."""
    try:
        os.utime(entry / CHECKSUMS)
    except FileNotFoundError:
        return False
    return True


def _fill(
    entry: Path, source: Path, files: Mapping[str, int], key: str, peers: NodePeers, connect: Connect
) -> None:
    """Make the copy under another name first, so that a copy with the right name is complete."""
    gigabytes = sum(files.values()) / 1e9
    _log.info("copying %.2f GB of weights from %s to %s, once on this node", gigabytes, source, entry)
    start = time.monotonic()
    incoming = entry.with_name(f".{entry.name}.incoming")
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir()
    try:
        copy = NodeCopy(incoming, source, files, key, peers, connect)
        digests = copy.fill()
        if _key(source, weight_files(source)) != key:
            raise CopyFailed("its files were changed meanwhile")
        (incoming / CHECKSUMS).write_text("".join(f"{digests[name]}  {name}\n" for name in files))
        incoming.rename(entry)
    except BaseException:
        shutil.rmtree(incoming, ignore_errors=True)
        raise
    seconds = time.monotonic() - start
    share = copy.num_source_bytes / max(1, sum(files.values()))
    _log.info(
        "copied in %.1f s, %.2f GB/s, %.0f %% from the source", seconds, gigabytes / seconds, 100 * share
    )


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a file, which the kernel releases if the process dies. Yields False if another holds it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
