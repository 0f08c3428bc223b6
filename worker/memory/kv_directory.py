"""KvDirectory: KV blocks in files, which several processes share and which outlive all of them.

A file has many blocks of one layout, is written once, and is never changed. Its first page or pages list the blocks:

    magic, version, number of blocks, bytes of a block, layout
    for each block: cache group, digest of the chain of tokens, nonce, code of (group, digest, content)
    HMAC of all of the above

The codes of blocks are those of AES-GCM with a random nonce, and the lists have HMAC-SHA-256, both by keys that are
made of the key of the server or fleet, and the former of the layout besides: who can write into the directory but has
no key can neither plant a block nor exchange two. They also find what a power failure tore, so that no file is
synced: a block that fails costs its computation.

Snapshots of states are blocks of a group and a length of their own, and have files of their own.

The files are on a file system or in an object store (`block_files`). They never have more bytes than allowed: a
writer deletes those that were used longest ago, of any process. A file that is deleted while it is read is a miss.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import struct
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import numpy as np

from ...proto.errors import ConfigError
from ...proto.options.values import BUCKET_SCHEME
from .block_files import SUFFIX, VERSION, BlockFiles, LocalFiles, OpenFile, write_all
from .bucket_files import BucketFiles

KEY_BYTES = 32
# Bytes of blocks in a file: at least the first, if there are so many to write; at most the second.
MIN_FILE_BYTES = 2 << 20
MAX_FILE_BYTES = 16 << 20
# Bytes that one read of consecutive blocks takes, which are verified while the next ones are read.
READ_BYTES = 4 << 20
# Files that the system is asked to read while an earlier one is verified: 16 MiB each.
FILES_AHEAD = 2

_MAGIC = b"quire-KV"
_HEADER = struct.Struct("<8sHHIQ16s")
_ENTRY = struct.Struct("<36s28s")
_TAG_BYTES = 32
# Of a block: the nonce, then the code. With random nonces a key may have 2^32 blocks.
_NONCE_BYTES, _CODE_BYTES = 12, 16
_PAGE = 4096

# Name of a block in a layout: its cache group, 4 bytes, and its digest.
BlockKey = bytes


@dataclass(slots=True)
class _File:
    """A file whose list of blocks was verified.

    Attributes:
        block_bytes: length of each block.
    """

    keys: tuple[BlockKey, ...]
    tags: tuple[bytes, ...]
    data_start: int
    block_bytes: int


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
        files: where the blocks are.
        layout: name of the layout, 16 bytes.
        block_bytes: lengths that blocks may have.
        key: of the HMACs.

    Attributes:
        num_foreign_files: files of this layout that were written with another key, or are damaged.
    """

    def __init__(self, files: BlockFiles, layout: bytes, block_bytes: Collection[int], key: bytes) -> None:
        self._store = files
        self._layout, self._lengths = layout, frozenset(block_bytes)
        # Imported here, because a rank without tiers does without the library.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(hmac.digest(key, b"blocks" + layout, "sha256"))
        self._list_mac = hmac.new(key, b"list", sha256)
        self._files: dict[str, _File] = {}
        self._foreign: set[str] = set()
        self._places: dict[BlockKey, tuple[str, int]] = {}
        self._lost: list[BlockKey] = []  # see take_lost
        # length of a block |-> own file with fewer than MIN_FILE_BYTES, whose blocks go into the next one
        self._small: dict[int, str] = {}

    @staticmethod
    def open(
        place: str, max_bytes: int, layout: bytes, block_bytes: Collection[int], key: bytes
    ) -> KvDirectory:
        """Open a directory, or a bucket named ``s3://BUCKET/PREFIX``.

        Args:
            max_bytes: of the files of all layouts and processes together.

        Raises:
            ConfigError: it cannot be used.
        """
        files: BlockFiles
        if place.startswith(BUCKET_SCHEME):
            files = BucketFiles(place, max_bytes, layout.hex())
        else:
            files = LocalFiles(Path(place), max_bytes, layout.hex())
        return KvDirectory(files, layout, block_bytes, key)

    @property
    def path(self) -> str:
        return self._store.name

    @property
    def num_bytes(self) -> int:
        """The bytes of all files, as last counted."""
        return self._store.num_bytes

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._places

    def keys(self) -> list[BlockKey]:
        """Return all blocks that are known."""
        return list(self._places)

    @property
    def num_foreign_files(self) -> int:
        return len(self._foreign)

    @staticmethod
    def max_blocks_per_file(block_bytes: int) -> int:
        return max(1, MAX_FILE_BYTES // (block_bytes + _ENTRY.size))

    # Index

    def scan(self) -> Changes:
        """Read the lists of new files, and forget those that are gone.

        Raises:
            OSError: the directory cannot be read.
        """
        changes = Changes()
        names = self._store.names()
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
            with self._store.open(name) as file:
                return self._parse_list(file)
        except OSError:
            return None

    def _parse_list(self, file: OpenFile) -> _File | None:
        head = _read(file, 0, _HEADER.size)
        if len(head) < _HEADER.size:
            return None
        magic, version, _, count, block_bytes, layout = _HEADER.unpack(head)
        if (magic, version, layout) != (_MAGIC, VERSION, self._layout) or count > _MAX_BLOCKS:
            return None
        if block_bytes not in self._lengths:
            return None
        raw = _read(file, _HEADER.size, count * _ENTRY.size + _TAG_BYTES)
        entries, tag = raw[: count * _ENTRY.size], raw[count * _ENTRY.size :]
        if not hmac.compare_digest(tag, self._tag_of_list(head + entries)):
            return None
        data_start = _data_start(count)
        if file.num_bytes != data_start + count * block_bytes:
            return None
        pairs = list(_ENTRY.iter_unpack(entries))
        return _File(tuple(key for key, _ in pairs), tuple(tag for _, tag in pairs), data_start, block_bytes)

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
                self._lost += self._forget(name)

    def take_lost(self) -> list[BlockKey]:
        """Return the blocks that became unknown while others were read, since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def _read_file(self, name: str, positions: list[int]) -> Iterator[ReadBlocks]:
        file = self._files[name]
        length = file.block_bytes
        with self._store.open(name) as opened:
            for start, end in _runs(positions, max(1, READ_BYTES // length)):
                content = np.empty((end - start) * length, np.uint8).data
                if opened.read_into(content, file.data_start + start * length) != len(content):
                    raise OSError(f"{name} is shorter than its list")
                yield ReadBlocks(file.keys[start:end], file.tags[start:end], content)
        self._store.touch(name)

    def _announce(self, name: str, positions: list[int]) -> None:
        """Let blocks of a file be read while this thread does something else."""
        start, end, file = min(positions), max(positions) + 1, self._files[name]
        offset = file.data_start + start * file.block_bytes
        self._store.announce(name, offset, (end - start) * file.block_bytes)

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
        """Write a file of blocks of one length, at most `max_blocks_per_file`, and delete what has no room beside it.

        Those of this process's last file are written again if that is small, and it is deleted.

        Raises:
            NoRoom: the file would not fit.
            OSError: it cannot be written; nothing is left of it.
        """
        own = {key for key, _ in blocks}
        merged, length = list(blocks), len(blocks[0][1])
        small, most = self._small.get(length, ""), self.max_blocks_per_file(length)
        if small in self._files and len(blocks) + len(self._files[small].keys) <= most:
            merged = [*self._genuine_blocks(small, own), *blocks]
        else:
            small = ""
        name, changes = f"{secrets.token_hex(16)}{SUFFIX}", Changes()
        file = self._write_file(name, merged, changes)
        changes.added += self._add(name, file)
        if small:
            self._store.delete(small)
            changes.removed += self._forget(small)
        is_small = len(merged) * (length + _ENTRY.size) < MIN_FILE_BYTES
        self._small[length] = name if is_small else ""
        changes.removed += self.take_lost()
        return changes

    def _genuine_blocks(self, name: str, without: set[BlockKey]) -> list[tuple[BlockKey, memoryview]]:
        """Return the blocks of a small file that are still what they were."""
        file, found = self._files[name], list[tuple[BlockKey, memoryview]]()
        keys, length = file.keys, file.block_bytes
        for read in self.read([key for key in keys if self._places.get(key, ("",))[0] == name]):
            for index, (key, tag) in enumerate(zip(read.keys, read.tags, strict=True)):
                content = read.content[index * length : (index + 1) * length]
                if key not in without and self.is_genuine(key, tag, content):
                    found.append((key, content))
        return found

    def _write_file(self, name: str, blocks: list[tuple[BlockKey, memoryview]], changes: Changes) -> _File:
        keys, length = tuple(key for key, _ in blocks), len(blocks[0][1])
        tags = tuple(self._tag(key, content, secrets.token_bytes(_NONCE_BYTES)) for key, content in blocks)
        head = _HEADER.pack(_MAGIC, VERSION, 0, len(blocks), length, self._layout)
        head += b"".join(map(_ENTRY.pack, keys, tags))
        head += self._tag_of_list(head)
        data_start = _data_start(len(blocks))
        parts: list[bytes | memoryview] = [head.ljust(data_start, b"\0"), *(content for _, content in blocks)]
        for deleted in self._store.write(name, parts):
            changes.removed += self._forget(deleted)
        return _File(keys, tags, data_start, length)


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


def _read(file: OpenFile, offset: int, num_bytes: int) -> bytes:
    """Return bytes of a file, fewer at its end."""
    content = bytearray(num_bytes)
    return bytes(content[: file.read_into(memoryview(content), offset)])


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
    temporary = path.parent / f".{secrets.token_hex(8)}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        write_all(descriptor, secrets.token_bytes(KEY_BYTES), 0)
        os.fsync(descriptor)
        os.link(temporary, path)  # unlike rename, it replaces no key that another process made meanwhile
    finally:
        os.close(descriptor)
        temporary.unlink()
