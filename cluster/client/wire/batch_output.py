"""Output of a batch: a line per finished request, appended as it finishes. An interrupted batch resumes from it."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import threading
from pathlib import Path
from typing import Any

from ....proto.errors import ConfigError
from ...os_utils.closing import Closing


class OutputFile(Closing):
    """The output of one batch. Threads may append; each line is one write, so that a crash tears the last at most.

    Opening it keeps the lines of an earlier, interrupted run.

    Attributes:
        done: custom_ids of the requests that have a line.
        num_failed: lines with an HTTP status of 400 or above.

    Raises:
        ConfigError: the file cannot be written, another run is writing it, or it holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.done: set[str] = set()
        self.num_failed = 0
        self._lock = threading.Lock()
        self._fd: int | None = None
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError(f"output file {path} cannot be written: {error.strerror}") from error
        try:
            self._take_over(fd, path)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def append(self, custom_id: str, status: int, body: Any) -> None:
        """Add the response to a request."""
        line = json.dumps(
            {
                "id": f"batch_req_{secrets.token_hex(12)}",
                "custom_id": custom_id,
                "response": {"status_code": status, "request_id": _request_id(body), "body": body},
                "error": None,
            },
            ensure_ascii=False,
        )
        with self._lock:
            if self._fd is None:
                raise ValueError("the output file is closed")
            _write_all(self._fd, f"{line}\n".encode())
            self._count(custom_id, status)

    def close(self) -> None:
        """Make the lines survive a power failure, and close the file. Safe to call twice."""
        with self._lock:
            fd, self._fd = self._fd, None
        if fd is not None:
            os.fsync(fd)
            os.close(fd)

    def _take_over(self, fd: int, path: Path) -> None:
        """Lock the file, read its lines and cut off a torn one."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"output file {path} is being written by another run") from error
        end = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                self._read_line(path, number, line)
                end += len(line)
        os.ftruncate(fd, end)

    def _read_line(self, path: Path, number: int, line: bytes) -> None:
        try:
            entry = json.loads(line)
            self._count(str(entry["custom_id"]), int(entry["response"]["status_code"]))
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"output file {path} line {number} is no line of a batch's output; give a file that does not exist"
            ) from error

    def _count(self, custom_id: str, status: int) -> None:
        self.done.add(custom_id)
        self.num_failed += status >= 400


def _request_id(body: Any) -> str:
    found = body.get("id") if isinstance(body, dict) else None
    return found if isinstance(found, str) else ""


def _write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
