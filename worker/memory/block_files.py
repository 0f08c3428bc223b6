"""BlockFiles: where the files of a KV directory are; LocalFiles has them on a file system.

Files of all layouts and processes share one bound of bytes. A process writes files of its own only, each once and
whole; it deletes those of any process.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from ...proto.errors import ConfigError

FOLDER, VERSION_FILE, SUFFIX = "quire-kv", "version", ".kv"
# Format of the files.
VERSION = 2
# A temporary file without a change for so long was left by a process that was killed.
STALE_S = 600.0
# Uses of a file within this time are recorded once.
TOUCH_INTERVAL_S = 60.0
_TEMPORARY = ".tmp"


class NoRoom(OSError):
    """There is no room for a file, and nothing may be deleted."""


class OpenFile(Protocol):
    """A file that is being read."""

    @property
    def num_bytes(self) -> int: ...

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Read into a buffer from an offset on; return how many bytes there were. Raises OSError."""
        ...


class BlockFiles(Protocol):
    """The files of one layout in one place. For one thread.

    Attributes:
        name: of the place, for people.
        num_bytes: of the files of all layouts, as last counted.
    """

    name: str
    num_bytes: int

    def names(self) -> set[str]:
        """Return the names of all files. Raises OSError."""
        ...

    @contextmanager
    def open(self, name: str) -> Iterator[OpenFile]:
        """Open a file; one that is deleted meanwhile stays readable, or fails. Raises OSError if it is missing."""
        ...

    def announce(self, name: str, start: int, length: int) -> None:
        """Tell that a part of a file will be read soon."""
        ...

    def touch(self, name: str) -> None:
        """Record that a file was used, after which it is deleted later than others, if the place knows of uses."""
        ...

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> list[str]:
        """Write a file, after those that were used longest ago were deleted until it fits.

        Returns the names of this layout's files that were deleted.

        Raises:
            NoRoom: it does not fit.
            OSError: it cannot be written; nothing is left of it.
        """
        ...

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        ...


class LocalFiles:
    """BlockFiles in a directory.

    A writer first reserves its file's length under a temporary name, then counts, those of others in progress
    included, and only then writes: so the bound holds without a lock, which network file systems do not all have.

    Args:
        path: made if it is missing.
        max_bytes: of the files of all layouts and processes together.
        layout: name of the folder.

    Raises:
        ConfigError: the directory cannot be used.
    """

    def __init__(self, path: Path, max_bytes: int, layout: str) -> None:
        self.name, self.num_bytes = str(path), 0
        self._path, self._max_bytes = path, max_bytes
        self._root = path / FOLDER
        self._own = self._root / layout
        self._touched: dict[str, float] = {}
        self._open_place()

    def _open_place(self) -> None:
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._root.mkdir(mode=0o700, exist_ok=True)
            mode = self._root.stat().st_mode
            if stat.S_IMODE(mode) & 0o077:
                raise ConfigError(
                    f"{self._root} is open to other users (mode {stat.S_IMODE(mode):04o}), must be 0700: it holds "
                    "what requests said; chmod it, or name another directory"
                )
            self._check_version()
            self._own.mkdir(mode=0o700, exist_ok=True)
            probe = self._own / f".{secrets.token_hex(8)}{_TEMPORARY}"
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            probe.unlink()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return  # full: what is there can be read all the same
            raise ConfigError(f"KV cannot be kept in {self._path}: {error}") from error

    def _check_version(self) -> None:
        """Check the version of the files, and record it in a new directory."""
        path = self._root / VERSION_FILE
        try:
            found = path.read_text().strip()
        except FileNotFoundError:
            temporary = self._root / f".{secrets.token_hex(8)}{_TEMPORARY}"
            temporary.write_text(f"{VERSION}\n")
            temporary.replace(path)
            return
        check_version(found, str(self._root))

    def names(self) -> set[str]:
        return {entry.name for entry in os.scandir(self._own) if entry.name.endswith(SUFFIX)}

    @contextmanager
    def open(self, name: str) -> Iterator[OpenFile]:
        descriptor = os.open(self._own / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            yield _LocalFile(descriptor)
        finally:
            os.close(descriptor)

    def announce(self, name: str, start: int, length: int) -> None:
        with suppress(OSError):
            descriptor = os.open(self._own / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)

    def touch(self, name: str) -> None:
        now = time.monotonic()
        if now - self._touched.get(name, -TOUCH_INTERVAL_S) >= TOUCH_INTERVAL_S:
            self._touched[name] = now
            with suppress(OSError):  # the file of another user, or gone
                os.utime(self._own / name)

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> list[str]:
        temporary = self._own / f".{name}{_TEMPORARY}"
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(descriptor, sum(map(len, parts)))  # the reservation
                deleted = self._make_room(temporary)
                offset = 0
                for part in parts:
                    write_all(descriptor, part, offset)
                    offset += len(part)
            finally:
                os.close(descriptor)
            temporary.rename(self._own / name)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        return deleted

    def _make_room(self, reserved: Path) -> list[str]:
        """Delete the files that were used longest ago until all fit, `reserved` included; see `write`."""
        files, now, deleted = list[tuple[float, int, Path]](), time.time(), list[str]()
        self.num_bytes = 0
        for path, found in self._all_files():
            is_temporary = path.name.endswith(_TEMPORARY)
            if is_temporary and now - found.st_mtime > STALE_S:
                with suppress(OSError):
                    path.unlink()
                continue
            self.num_bytes += found.st_size
            if not is_temporary:
                files.append((found.st_mtime, found.st_size, path))
        files.sort(reverse=True)
        while self.num_bytes > self._max_bytes and files:
            _, size, path = files.pop()
            with suppress(FileNotFoundError):
                path.unlink()
            if path.parent == self._own:
                deleted.append(path.name)
                self._touched.pop(path.name, None)
            self.num_bytes -= size
        if self.num_bytes > self._max_bytes:
            raise NoRoom(errno.ENOSPC, f"{reserved.name} does not fit into {self._max_bytes:,} bytes")
        return deleted

    def _all_files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield the files of all layouts and processes."""
        for folder in os.scandir(self._root):
            if not folder.is_dir(follow_symlinks=False):
                continue
            with suppress(FileNotFoundError):  # another process removed the folder
                for entry in os.scandir(folder.path):
                    if entry.name.endswith((SUFFIX, _TEMPORARY)):
                        with suppress(FileNotFoundError):
                            yield Path(entry.path), entry.stat(follow_symlinks=False)

    def delete(self, name: str) -> None:
        self._touched.pop(name, None)
        with suppress(FileNotFoundError):
            (self._own / name).unlink()


class _LocalFile:
    """An OpenFile."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read_into(self, buffer: memoryview, offset: int) -> int:
        return os.preadv(self._descriptor, [buffer], offset)


def check_version(found: str, place: str) -> None:
    """Raise ConfigError if files are of another version."""
    if found != str(VERSION):
        raise ConfigError(
            f"{place} has KV files of version {found[:16]!r}, must be {VERSION}: name another directory, or remove it"
        )


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    rest = memoryview(data).cast("B")
    while rest:
        count = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[count:], offset + count
