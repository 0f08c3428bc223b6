"""BatchStore: uploaded files and batches of all tenants in a directory, as OpenAI's objects beside their contents."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....proto.errors import ConfigError, InvalidRequest, QuotaExceeded, RequestNotFound

Item = dict[str, Any]

# Of one tenant: files with their outputs, and their bytes.
MAX_FILES = 1000
MAX_TOTAL_BYTES = 1 << 30
MAX_NAME_CHARS = 256
# Seconds for which files and ended batches are kept.
RETENTION_S = 30 * 86_400

_IDS = re.compile(r"(file|batch)-[0-9a-f]{32}")


class BatchStore:
    """Objects and contents by tenant and id; each change is on disk before the call returns. Threads may share one.

    Args:
        folder: one gateway uses it at a time.

    Raises:
        ConfigError: the directory cannot be written, or another gateway uses it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"batch directory {folder} is used by another gateway, must be its own"
            ) from error
        except OSError as error:
            raise ConfigError(f"batch directory {folder} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Let another gateway use the directory. Safe to call twice."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def add_file(self, tenant: str, name: str, purpose: str, content: bytes) -> Item:
        """Keep an uploaded file. Raises QuotaExceeded if the tenant has too many files or bytes."""
        self._sweep(tenant)
        self._check_room(tenant, len(content))
        file_id = self.new_id("file")
        path = self.content_path(tenant, file_id)
        with open(path, "xb", opener=_private) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return self.publish(tenant, file_id, name, purpose)

    def publish(self, tenant: str, file_id: str, name: str, purpose: str) -> Item:
        """Make a content an object."""
        now = int(time.time())
        size = self.content_path(tenant, file_id).stat().st_size
        entry = {
            "id": file_id, "object": "file", "bytes": size, "created_at": now, "expires_at": now + RETENTION_S,
            "filename": name[:MAX_NAME_CHARS], "purpose": purpose, "status": "processed",
        }  # fmt: skip
        self.put(tenant, entry)
        return entry

    def put(self, tenant: str, entry: Item) -> None:
        """Write an object in place of an older one."""
        path = self._path(tenant, entry["id"], "json")
        new = path.with_suffix(".new")
        with open(new, "wb", opener=_private) as file:
            file.write(json.dumps({"tenant": tenant, "entry": entry}).encode())
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)

    def get(self, tenant: str, kind: str, entry_id: str) -> Item:
        """Return an object. Raises RequestNotFound if the tenant has none of this kind and id."""
        if _IDS.fullmatch(entry_id) and entry_id.startswith(f"{kind}-"):
            try:
                entry: Item = json.loads(self._path(tenant, entry_id, "json").read_bytes())["entry"]
            except FileNotFoundError:
                pass
            else:
                return entry
        raise RequestNotFound(f"there is no {kind} {entry_id[:100]!r}")

    def entries(self, tenant: str, kind: str) -> list[Item]:
        """Return the objects of a kind, the newest first."""
        self._sweep(tenant)
        found = [entry for owner, entry in self._entries(self._of(tenant)) if entry["object"] == kind]
        return sorted(found, key=lambda entry: (entry["created_at"], entry["id"]), reverse=True)

    def content_path(self, tenant: str, file_id: str) -> Path:
        """Return the path of a file's content, which may not exist yet."""
        return self._path(tenant, file_id, "jsonl")

    def delete(self, tenant: str, entry_id: str) -> None:
        """Drop an object and its content, if they exist."""
        for suffix in ("json", "jsonl"):
            self._path(tenant, entry_id, suffix).unlink(missing_ok=True)

    def unfinished(self) -> list[tuple[str, Item]]:
        """Return the batches of all tenants that have not ended."""
        folders = [each for each in self._folder.iterdir() if each.is_dir()]
        entries = (pair for folder in folders for pair in self._entries(folder))
        return [
            (tenant, entry)
            for tenant, entry in entries
            if entry["object"] == "batch" and not has_ended(entry)
        ]

    @staticmethod
    def new_id(kind: str) -> str:
        return f"{kind}-{secrets.token_hex(16)}"

    def _check_room(self, tenant: str, num_bytes: int) -> None:
        sizes = [each.stat().st_size for each in self._of(tenant).iterdir()]
        if len(sizes) >= 2 * MAX_FILES:  # an object and a content each
            raise QuotaExceeded(tenant, "batch_files", MAX_FILES)
        if sum(sizes) + num_bytes > MAX_TOTAL_BYTES:
            raise QuotaExceeded(tenant, "batch_bytes", MAX_TOTAL_BYTES)

    def _sweep(self, tenant: str) -> None:
        """Drop what is too old."""
        now = time.time()
        for _, entry in list(self._entries(self._of(tenant))):
            is_batch = entry["object"] == "batch"
            end = entry["created_at"] + RETENTION_S if is_batch else entry["expires_at"]
            if end < now and (not is_batch or has_ended(entry)):
                self.delete(tenant, entry["id"])

    def _entries(self, folder: Path) -> Iterator[tuple[str, Item]]:
        for path in folder.glob("*.json"):
            try:
                stored = json.loads(path.read_bytes())
            except FileNotFoundError:  # was dropped meanwhile
                continue
            yield stored["tenant"], stored["entry"]

    def _of(self, tenant: str) -> Path:
        folder = self._folder / hashlib.sha256(tenant.encode()).hexdigest()[:32]
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def _path(self, tenant: str, entry_id: str, suffix: str) -> Path:
        if not _IDS.fullmatch(entry_id):
            raise InvalidRequest("id", "is not an id of this server")
        return self._of(tenant) / f"{entry_id}.{suffix}"


def has_ended(batch: Item) -> bool:
    """Return whether a batch will not change."""
    return batch["status"] in ("completed", "failed", "expired", "cancelled")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
