"""Latencies that a recorded trace has of the server that recorded it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from ...proto.errors import ConfigError
from .distribution import Distribution
from .traces import open_trace


@dataclass(slots=True)
class RecordedLatencies:
    """Times to the first token and to the end, as clients saw them."""

    ttft: Distribution = field(default_factory=Distribution)
    e2e: Distribution = field(default_factory=Distribution)


def read_latencies(path: Path, limit: int | None = None) -> RecordedLatencies:
    """Return the latencies in a trace that `quire serve --record-trace` wrote; none of another trace.

    Raises:
        ConfigError: the file cannot be read.
    """
    found = RecordedLatencies()
    if ".csv" in path.suffixes:
        return found
    with open_trace(path) as file:
        for number, line in enumerate(file):
            if limit is not None and number >= limit:
                break
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}, line {number + 1} is not JSON: {error}") from error
            if "ttft_s" in row and "error" not in row:
                found.ttft.add(float(row["ttft_s"]))
                found.e2e.add(float(row["e2e_s"]) if "e2e_s" in row else float(row["ttft_s"]))
    return found
