"""Input of a batch: a JSON object per line, each one HTTP request, in the format of OpenAI's Batch API."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....proto.errors import ConfigError

# OpenAI's files have at most 50,000 lines; here only the ids of all lines are kept in memory.
MAX_LINE_BYTES = 16 << 20
# Beginnings of the paths of endpoints; vLLM's scores and ranks have paths without a version.
_PATHS = ("/v1/", "/v2/", "/score", "/rerank", "/pooling", "/classify")
# Problems that are named before the rest is counted.
_MAX_NAMED = 10


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
