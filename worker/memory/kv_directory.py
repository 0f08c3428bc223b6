"""KvDirectory: KV blocks in files of one directory, which several processes share and which outlive all of them.

A file has many blocks of one layout, is written once under a temporary name and renamed, and is never changed. Its
first page or pages list the blocks:

    magic, version, number of blocks, bytes of a block, layout
    for each block: cache group, digest of the chain of tokens, nonce, code of (group, digest, content)
    HMAC of all of the above

The codes of blocks are those of AES-GCM with a random nonce, and the lists have HMAC-SHA-256, both by keys that are
made of the key of the server or fleet, and the former of the layout besides: who can write into the directory but has
no key can neither plant a block nor exchange two. They also find what a power failure tore, so that no file is
synced: a block that fails costs its computation.

A process writes files of its own only. It deletes whole files of any process, those that were used longest ago, so
that the files never have more bytes than allowed: a writer first reserves its file's length under the temporary name,
then counts, those of others in progress included, and only then writes. A reader keeps a file that is deleted
meanwhile open, or finds it missing, which is a miss.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import numpy as np

from ...proto.errors import ConfigError

VERSION = 2
KEY_BYTES = 32
# Bytes of blocks in a file: at least the first, if there are so many to write; at most the second.
MIN_FILE_BYTES = 2 << 20
MAX_FILE_BYTES = 16 << 20
# Bytes that one read of consecutive blocks takes, which are verified while the next ones are read.
READ_BYTES = 4 << 20
# Files that the system is asked to read while an earlier one is verified: 16 MiB each.
FILES_AHEAD = 2
# A temporary file without a change for so long was left by a process that was killed.
STALE_S = 600.0
# Uses of a file within this time are recorded once.
TOUCH_INTERVAL_S = 60.0

_MAGIC = b"quire-KV"
_HEADER = struct.Struct("<8sHHIQ16s")
_ENTRY = struct.Struct("<36s28s")
_TAG_BYTES = 32
# Of a block: the nonce, then the code. With random nonces a key may have 2^32 blocks.
_NONCE_BYTES, _CODE_BYTES = 12, 16
_PAGE = 4096
_FOLDER, _VERSION_FILE = "quire-kv", "version"
_SUFFIX, _TEMPORARY = ".kv", ".tmp"

# Name of a block in a layout: its cache group, 4 bytes, and its digest.
BlockKey = bytes


class NoRoom(OSError):
    """The directory has no room, and nothing in it may be deleted."""


@dataclass(slots=True)
class _File:
    """A file whose list of blocks was verified."""

    keys: tuple[BlockKey, ...]
    tags: tuple[bytes, ...]
    data_start: int
    touched_at: float = 0.0


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Consecutive blocks that were read; `KvDirectory.is_genuine` tells whether each is what its name says.

    Attributes:
        keys, tags: of the blocks.
        content: of all blocks, one after the other.
    """

    keys: tuple[BlockKey, ...]
    tags: tuple[bytes, ...]
    content: memoryview


@dataclass(slots=True)
class Changes:
    """Blocks that became known or unknown in a directory."""

    added: list[BlockKey] = field(default_factory=list)
    removed: list[BlockKey] = field(default_factory=list)


class KvDirectory:
    """The blocks of one layout in a directory. For one thread at a time, except `is_genuine`.

    Args:
        path: made if it is missing.
        max_bytes: of the files of all layouts and processes together.
        layout: name of the layout, 16 bytes.
        block_bytes: length of a block.
        key: of the HMACs.

    Attributes:
        num_bytes: of all files, as last counted.
        num_foreign_files: files of this layout that were written with another key, or are damaged.

    Raises:
        ConfigError: the directory cannot be used.
    """

    def __init__(self, path: Path, max_bytes: int, layout: bytes, block_bytes: int, key: bytes) -> None:
        self.path, self.max_bytes = path, max_bytes
        self.num_bytes = 0
        self._layout, self._block_bytes = layout, block_bytes
        # Imported here, because a rank without tiers does without the library.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(hmac.digest(key, b"blocks" + layout, "sha256"))
        self._list_mac = hmac.new(key, b"list", sha256)
        self._root = path / _FOLDER
        self._own = self._root / layout.hex()
        self._files: dict[str, _File] = {}
        self._foreign: set[str] = set()
        self._places: dict[BlockKey, tuple[str, int]] = {}
        self._small = ""  # own file with fewer than MIN_FILE_BYTES, whose blocks go into the next one
        self._open()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._places

    def keys(self) -> list[BlockKey]:
        """Return all blocks that are known."""
        return list(self._places)

    @property
    def num_foreign_files(self) -> int:
        return len(self._foreign)

    @property
    def max_blocks_per_file(self) -> int:
        return max(1, MAX_FILE_BYTES // self._block_bytes)

    def _open(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
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
            raise ConfigError(f"KV cannot be kept in {self.path}: {error}") from error

    def _check_version(self) -> None:
        """Check the version of the files, and record it in a new directory."""
        path = self._root / _VERSION_FILE
        try:
            found = path.read_text().strip()
        except FileNotFoundError:
            temporary = self._root / f".{secrets.token_hex(8)}{_TEMPORARY}"
            temporary.write_text(f"{VERSION}\n")
            temporary.replace(path)
            return
        if found != str(VERSION):
            raise ConfigError(
                f"{self._root} has KV files of version {found[:16]!r}, must be {VERSION}: name another directory, or "
                "remove it"
            )

    # Index

    def scan(self) -> Changes:
        """Read the lists of new files, and forget those that are gone.

        Raises:
            OSError: the directory cannot be read.
        """
        changes = Changes()
        names = {entry.name for entry in os.scandir(self._own) if entry.name.endswith(_SUFFIX)}
        for name in self._files.keys() - names:
            changes.removed += self._forget(name)
        self._foreign &= names
        for name in sorted(names - self._files.keys() - self._foreign):
            file = self._read_list(name)
            if file is None:
                self._foreign.add(name)
            else:
                changes.added += self._add(name, file)
        return changes

    def _add(self, name: str, file: _File) -> list[BlockKey]:
        """Add a file; return its blocks that no other file has."""
        self._files[name] = file
        fresh = [key for key in file.keys if key not in self._places]
        self._places.update((key, (name, index)) for index, key in enumerate(file.keys))
        return fresh

    def _forget(self, name: str) -> list[BlockKey]:
        """Forget a file; return its blocks that are in no other one."""
        file = self._files.pop(name, None)
        gone = [] if file is None else [key for key in file.keys if self._places.get(key, ("",))[0] == name]
        for key in gone:
            del self._places[key]
        return gone

    def forget_block(self, key: BlockKey) -> None:
        """Forget a block that was not genuine."""
        self._places.pop(key, None)

    def _read_list(self, name: str) -> _File | None:
        """Return a file's list; None if it is missing, damaged, or of another key, size or version."""
        try:
            descriptor = os.open(self._own / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            head = os.pread(descriptor, _HEADER.size, 0)
            if len(head) < _HEADER.size:
                return None
            magic, version, _, count, block_bytes, layout = _HEADER.unpack(head)
            expected = magic, version, block_bytes, layout
            if expected != (_MAGIC, VERSION, self._block_bytes, self._layout) or count > _MAX_BLOCKS:
                return None
            raw = os.pread(descriptor, count * _ENTRY.size + _TAG_BYTES, _HEADER.size)
            entries, tag = raw[: count * _ENTRY.size], raw[count * _ENTRY.size :]
            if not hmac.compare_digest(tag, self._tag_of_list(head + entries)):
                return None
            data_start = _data_start(count)
            if os.fstat(descriptor).st_size != data_start + count * block_bytes:
                return None
        except OSError:
            return None
        finally:
            os.close(descriptor)
        pairs = list(_ENTRY.iter_unpack(entries))
        return _File(tuple(key for key, _ in pairs), tuple(tag for _, tag in pairs), data_start)

    # Reads

    def read(self, keys: Sequence[BlockKey]) -> Iterator[ReadBlocks]:
        """Yield those of the blocks that are found, several that follow each other at once.

        A file that is missing or shorter than its list is forgotten; what it had is not yielded.
        """
        of_file: dict[str, list[int]] = {}
        for key in keys:
            if (place := self._places.get(key)) is not None:
                of_file.setdefault(place[0], []).append(place[1])
        names = list(of_file)
        for number, name in enumerate(names):
            for later in (
                names[number + FILES_AHEAD : number + FILES_AHEAD + 1] if number else names[: FILES_AHEAD + 1]
            ):
                self._announce(later, of_file[later])
            try:
                yield from self._read_file(name, sorted(set(of_file[name])))
            except OSError:
                self._forget(name)

    def _read_file(self, name: str, positions: list[int]) -> Iterator[ReadBlocks]:
        file, most = self._files[name], max(1, READ_BYTES // self._block_bytes)
        descriptor = os.open(self._own / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            for start, end in _runs(positions, most):
                content = np.empty((end - start) * self._block_bytes, np.uint8).data
                offset = file.data_start + start * self._block_bytes
                if os.preadv(descriptor, [content], offset) != len(content):
                    raise OSError(f"{name} is shorter than its list")
                yield ReadBlocks(file.keys[start:end], file.tags[start:end], content)
            self._touch(name, file)
        finally:
            os.close(descriptor)

    def _announce(self, name: str, positions: list[int]) -> None:
        """Let the system read blocks of a file into its page cache, while this thread does something else."""
        with suppress(OSError):
            descriptor = os.open(self._own / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                start = self._files[name].data_start + min(positions) * self._block_bytes
                length = (max(positions) - min(positions) + 1) * self._block_bytes
                os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)

    def _touch(self, name: str, file: _File) -> None:
        """Record the use of a file in its time of change, by which files are deleted."""
        now = time.monotonic()
        if not file.touched_at or now - file.touched_at > TOUCH_INTERVAL_S:
            file.touched_at = now
            with suppress(OSError):  # the file of another user, or gone
                os.utime(self._own / name)

    def is_genuine(self, key: BlockKey, tag: bytes, content: memoryview | bytes) -> bool:
        """Return whether a block's content is what was written under its name with this key. For any thread."""
        return hmac.compare_digest(tag, self._tag(key, content, tag[:_NONCE_BYTES]))

    def _tag(self, key: BlockKey, content: memoryview | bytes, nonce: bytes) -> bytes:
        """Return a nonce and the code of a block, whose content is authenticated and not encrypted."""
        return nonce + self._cipher.encrypt(nonce, key, content)[-_CODE_BYTES:]

    def _tag_of_list(self, raw: bytes) -> bytes:
        mac = self._list_mac.copy()
        mac.update(raw)
        return mac.digest()

    # Writes

    def write(self, blocks: Sequence[tuple[BlockKey, memoryview]]) -> Changes:
        """Write a file of blocks, at most `max_blocks_per_file`, and delete what has no room beside it.

        Those of this process's last file are written again if that is small, and it is deleted.

        Raises:
            NoRoom: the file would not fit.
            OSError: it cannot be written; nothing is left of it.
        """
        own = {key for key, _ in blocks}
        merged = list(blocks)
        small = self._small
        if small in self._files and len(blocks) + len(self._files[small].keys) <= self.max_blocks_per_file:
            merged = [*self._genuine_blocks(small, own), *blocks]
        else:
            small = ""
        name, changes = f"{secrets.token_hex(16)}{_SUFFIX}", Changes()
        file = self._write_file(name, merged, changes)
        changes.added += self._add(name, file)
        if small:
            changes.removed += self._delete(self._own / small)
        is_small = len(merged) * self._block_bytes < MIN_FILE_BYTES
        self._small = name if is_small else ""
        return changes

    def _genuine_blocks(self, name: str, without: set[BlockKey]) -> list[tuple[BlockKey, memoryview]]:
        """Return the blocks of a small file that are still what they were."""
        keys, found = self._files[name].keys, list[tuple[BlockKey, memoryview]]()
        for read in self.read([key for key in keys if self._places.get(key, ("",))[0] == name]):
            for index, (key, tag) in enumerate(zip(read.keys, read.tags, strict=True)):
                content = read.content[index * self._block_bytes : (index + 1) * self._block_bytes]
                if key not in without and self.is_genuine(key, tag, content):
                    found.append((key, content))
        return found

    def _write_file(self, name: str, blocks: list[tuple[BlockKey, memoryview]], changes: Changes) -> _File:
        keys = tuple(key for key, _ in blocks)
        tags = tuple(self._tag(key, content, secrets.token_bytes(_NONCE_BYTES)) for key, content in blocks)
        head = _HEADER.pack(_MAGIC, VERSION, 0, len(blocks), self._block_bytes, self._layout)
        head += b"".join(map(_ENTRY.pack, keys, tags))
        head += self._tag_of_list(head)
        data_start = _data_start(len(blocks))
        temporary = self._own / f".{name}{_TEMPORARY}"
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(descriptor, data_start + len(blocks) * self._block_bytes)  # the reservation
                self._make_room(temporary, changes)
                _write_all(descriptor, head.ljust(data_start, b"\0"), 0)
                for index, (_, content) in enumerate(blocks):
                    _write_all(descriptor, content, data_start + index * self._block_bytes)
            finally:
                os.close(descriptor)
            temporary.rename(self._own / name)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        return _File(keys, tags, data_start)

    def _make_room(self, reserved: Path, changes: Changes) -> None:
        """Delete the files that were used longest ago until all fit, `reserved` included. Raises NoRoom."""
        files, now = list[tuple[float, int, Path]](), time.time()
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
        while self.num_bytes > self.max_bytes and files:
            _, size, path = files.pop()
            changes.removed += self._delete(path)
            self.num_bytes -= size
        if self.num_bytes > self.max_bytes:
            raise NoRoom(errno.ENOSPC, f"{reserved.name} does not fit into {self.max_bytes:,} bytes")

    def _all_files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield the files of all layouts and processes."""
        for folder in os.scandir(self._root):
            if not folder.is_dir(follow_symlinks=False):
                continue
            with suppress(FileNotFoundError):  # another process removed the folder
                for entry in os.scandir(folder.path):
                    if entry.name.endswith((_SUFFIX, _TEMPORARY)):
                        with suppress(FileNotFoundError):
                            yield Path(entry.path), entry.stat(follow_symlinks=False)

    def _delete(self, path: Path) -> list[BlockKey]:
        """Delete a file; return the blocks that are gone with it."""
        with suppress(FileNotFoundError):
            path.unlink()
        return self._forget(path.name) if path.parent == self._own else []


# Bounds what a damaged list makes a reader allocate.
_MAX_BLOCKS = 1 << 20


def _data_start(num_blocks: int) -> int:
    """Return the offset of the first block, a whole number of pages."""
    return -(-(_HEADER.size + num_blocks * _ENTRY.size + _TAG_BYTES) // _PAGE) * _PAGE


def _runs(positions: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of positions, ascending and distinct, that follow each other, at most `most` at once."""
    start = end = positions[0]
    for position in positions:
        if position != end or end - start == most:
            yield start, end
            start = position
        end = position + 1
    yield start, end


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    rest = memoryview(data).cast("B")
    while rest:
        count = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[count:], offset + count


def read_key(path: Path) -> bytes:
    """Return the key in a file that only its owner may read; make it if the file is missing.

    Raises:
        ConfigError: the file cannot be read or made, others may read it, or it has another length.
    """
    try:
        with suppress(FileExistsError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _create_key(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found, key = os.fstat(descriptor), os.read(descriptor, KEY_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"the key of stored KV cannot be read: {error}") from error
    if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{path} may be read or changed by other users (mode {stat.S_IMODE(found.st_mode):04o}, user "
            f"{found.st_uid}), must be this user's own with mode 0600"
        )
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{path} has {len(key)} bytes or more, must have {KEY_BYTES} random ones")
    return key


def _create_key(path: Path) -> None:
    """Make a key file, whole or not at all. Raises FileExistsError if there is one."""
    if path.exists():
        raise FileExistsError(path)
    temporary = path.parent / f".{secrets.token_hex(8)}{_TEMPORARY}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _write_all(descriptor, secrets.token_bytes(KEY_BYTES), 0)
        os.fsync(descriptor)
        os.link(temporary, path)  # unlike rename, it replaces no key that another process made meanwhile
    finally:
        os.close(descriptor)
        temporary.unlink()
