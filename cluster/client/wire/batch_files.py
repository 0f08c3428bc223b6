"""Files of a batch: a line per HTTP request in the format of OpenAI's Batch API, and a line per finished request.

The output is appended as requests finish. An interrupted batch resumes from it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....proto.errors import ConfigError
from ...os_utils.closing import Closing

# OpenAI's files have at most 50,000 lines; here only the ids of all lines are kept in memory.
MAX_LINE_BYTES = 16 << 20
# Beginnings of the paths of endpoints; vLLM's scores and ranks have paths without a version.
_PATHS = ("/v1/", "/v2/", "/score", "/rerank", "/pooling", "/classify")
# Problems that are named before the rest is counted.
_MAX_NAMED = 10


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


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input.

    Attributes:
        custom_id: names the request in the output; unique in the file.
        url: path of the endpoint, for example ``/v1/chat/completions``.
        body: the endpoint's request.
    """

    custom_id: str
    url: str
    body: dict[str, Any]


def check_batch(path: Path) -> int:
    """Return the number of requests of the file, after checking all of them.

    Raises:
        ConfigError: the file cannot be read, or lines are not requests; names the first of them.
    """
    problems: list[str] = []
    num_problems = num_requests = 0
    seen: set[str] = set()
    for number, line in _lines(path):
        num_requests += 1
        try:
            request = parse_request(line)
            if request.custom_id in seen:
                raise ValueError(
                    f"custom_id is {request.custom_id!r}, which an earlier line has, must be unique"
                )
            seen.add(request.custom_id)
        except ValueError as error:
            num_problems += 1
            if len(problems) < _MAX_NAMED:
                problems.append(f"{path} line {number}: {error}")
    if num_problems > len(problems):
        problems.append(f"{path}: {num_problems - len(problems)} more lines are not requests")
    if problems:
        raise ConfigError.of(problems)
    return num_requests


def read_batch(path: Path, done: Collection[str]) -> Iterator[BatchRequest]:
    """Yield the requests of a checked file, except those whose custom_id is in `done`."""
    for _, line in _lines(path):
        request = parse_request(line)
        if request.custom_id not in done:
            yield request


def parse_request(line: bytes) -> BatchRequest:
    """Return the request of a line. Raises ValueError, with what is wrong, if it is none."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"has {len(line)} bytes, must have at most {MAX_LINE_BYTES}")
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ValueError("is not a JSON object")
    custom_id, url, body = (entry.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError(f"custom_id is {custom_id!r}, must be a text")
    if entry.get("method", "POST") != "POST":
        raise ValueError(f"method is {entry['method']!r}, must be POST")
    if not isinstance(url, str) or not url.startswith(_PATHS) or not url.isascii() or not url.isprintable():
        raise ValueError(f"url is {url!r}, must be the path of an endpoint, for example /v1/chat/completions")
    if not isinstance(body, dict):
        raise ValueError("body is not a JSON object")
    if body.get("stream"):
        raise ValueError("body.stream is true, must be false in a batch")
    return BatchRequest(custom_id, url, body)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of each line that is not blank."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(f"batch file {path} cannot be read: {error.strerror}") from error
