"""BucketFiles: BlockFiles in a bucket of an object store that speaks S3's protocol (AWS, MinIO, Ceph, GCS, R2).

Credentials, region and address of the store are found as every tool of AWS finds them: in environment variables
(`AWS_ENDPOINT_URL_S3` for another store than AWS), in files, or from the machine's role. Every request has a
deadline, and runs on the tier's own thread.

A store tells nothing of uses: the objects that were written first are deleted first. Two servers that write at the
same moment may exceed the bound by a file each, which the next write deletes.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

from ...proto.errors import ConfigError
from ...proto.options.values import BUCKET_SCHEME
from .block_files import FOLDER, SUFFIX, VERSION, VERSION_FILE, NoRoom, OpenFile, check_version

# A store that does not answer within these times is done without, for the blocks that were asked for.
CONNECT_TIMEOUT_S, READ_TIMEOUT_S, MAX_ATTEMPTS = 2.0, 5.0, 2
# The beginning of an object is read at once: it has the list of the blocks.
_HEAD_BYTES = 64 << 10
_MISSING = ("NoSuchKey", "404", "NotFound")


class BucketFiles:
    """BlockFiles in a bucket, below a prefix.

    Args:
        place: ``s3://BUCKET`` or ``s3://BUCKET/PREFIX``.
        max_bytes, layout: as for LocalFiles.

    Raises:
        ConfigError: boto3 is missing, or the bucket cannot be used.
    """

    def __init__(self, place: str, max_bytes: int, layout: str) -> None:
        self.name, self.num_bytes, self._max_bytes = place, 0, max_bytes
        try:
            import boto3
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError, ClientError
            from urllib3.exceptions import HTTPError  # of a connection that ends while a body is read
        except ImportError as error:
            raise ConfigError(f"{place} needs boto3: pip install 'quire[s3]' ({error})") from error
        self._errors: tuple[type[Exception], ...] = (BotoCoreError, ClientError, HTTPError)
        self._bucket, _, prefix = place.removeprefix(BUCKET_SCHEME).partition("/")
        self._root = f"{prefix.rstrip('/')}/{FOLDER}/".lstrip("/")
        self._own = f"{self._root}{layout}/"
        config = Config(
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            retries={"total_max_attempts": MAX_ATTEMPTS},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        try:
            self._client: Any = boto3.client("s3", config=config)
            self._check_version()
        except (*self._errors, OSError, ValueError) as error:
            raise ConfigError(f"KV cannot be kept in {place}: {error}") from error

    def _check_version(self) -> None:
        key = self._root + VERSION_FILE
        try:
            found = self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read(64)
        except self._errors as error:
            if _code(error) not in _MISSING:
                raise
            self._client.put_object(Bucket=self._bucket, Key=key, Body=f"{VERSION}\n".encode())
            return
        check_version(found.decode(errors="replace").strip(), self.name)

    def names(self) -> set[str]:
        start = len(self._own)
        return {key[start:] for key, _, _ in self._list(self._own) if key.endswith(SUFFIX)}

    @contextmanager
    def open(self, name: str) -> Iterator[OpenFile]:
        yield _BucketFile(self, self._own + name)

    def announce(self, name: str, start: int, length: int) -> None:
        pass

    def touch(self, name: str) -> None:
        pass

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> list[str]:
        deleted = self._make_room(sum(map(len, parts)))
        body = io.BytesIO(b"".join(parts))
        with self._as_os_errors():
            self._client.put_object(Bucket=self._bucket, Key=self._own + name, Body=body)
        return deleted

    def _make_room(self, num_bytes: int) -> list[str]:
        """Delete the oldest objects until so many bytes fit; return those of this layout."""
        found = sorted(self._list(self._root), key=lambda each: each[2], reverse=True)
        self.num_bytes, deleted = num_bytes + sum(size for _, size, _ in found), list[str]()
        while self.num_bytes > self._max_bytes and found:
            key, size, _ = found.pop()
            if not key.endswith(SUFFIX):
                continue
            self._remove(key)
            if key.startswith(self._own):
                deleted.append(key[len(self._own) :])
            self.num_bytes -= size
        if self.num_bytes > self._max_bytes:
            raise NoRoom(errno.ENOSPC, f"{num_bytes:,} bytes do not fit into {self._max_bytes:,}")
        return deleted

    def delete(self, name: str) -> None:
        with suppress(OSError):
            self._remove(self._own + name)

    def _remove(self, key: str) -> None:
        with self._as_os_errors():
            self._client.delete_object(Bucket=self._bucket, Key=key)

    def _list(self, prefix: str) -> Iterator[tuple[str, int, float]]:
        """Yield key, bytes and time of each object. Raises OSError."""
        with self._as_os_errors():
            for page in self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=prefix
            ):
                for each in page.get("Contents", ()):
                    yield each["Key"], each["Size"], each["LastModified"].timestamp()

    def get(self, key: str, start: int, num_bytes: int) -> tuple[bytes, int]:
        """Return bytes of an object, and the object's length. Raises OSError."""
        with self._as_os_errors():
            answer = self._client.get_object(
                Bucket=self._bucket, Key=key, Range=f"bytes={start}-{start + num_bytes - 1}"
            )
            whole = int(answer["ContentRange"].rpartition("/")[2])
            return cast(bytes, answer["Body"].read(num_bytes)), whole

    @contextmanager
    def _as_os_errors(self) -> Iterator[None]:
        """Raise the store's errors as OSError, as the errors of a file system."""
        try:
            yield
        except self._errors as error:
            number = errno.ENOENT if _code(error) in _MISSING else errno.EIO
            raise OSError(number, f"{self.name}: {error}") from error


class _BucketFile:
    """An OpenFile."""

    def __init__(self, files: BucketFiles, key: str) -> None:
        self._files, self._key = files, key
        self._head, self._num_bytes = b"", -1

    @property
    def num_bytes(self) -> int:
        if self._num_bytes < 0:
            self._head, self._num_bytes = self._files.get(self._key, 0, _HEAD_BYTES)
        return self._num_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        end = offset + len(buffer)
        if end <= _HEAD_BYTES and self.num_bytes:
            content = self._head[offset:end]
        else:
            content, self._num_bytes = self._files.get(self._key, offset, len(buffer))
        buffer[: len(content)] = content
        return len(content)


def _code(error: Exception) -> str:
    """Return the store's name for an error; empty for other errors."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""
