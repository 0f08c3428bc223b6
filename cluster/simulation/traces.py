"""Traces of requests, read one line at a time: arrivals, lengths and shared prefixes, without texts."""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ...proto.block_tables import IntArray
from ...proto.errors import ConfigError

# Tokens of a block of which a trace states no size.
BLOCK_TOKENS = 16
VOCAB_SIZE = 32_000
FIRST_TOKEN = 10  # smaller ids are special in most models
# Mooncake's traces state no size of a block.
_MOONCAKE_BLOCK_TOKENS = 512

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace.

    Attributes:
        number: its position in the trace, from 0.
        block_hashes: identity of each block of `block_tokens` prompt tokens, of which the last may be partial; empty
            if the prompt shares no block.
    """

    number: int
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_hashes: tuple[int, ...] = ()
    block_tokens: int = BLOCK_TOKENS

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    def prompt(self) -> IntArray:
        """Return random token ids, [num_prompt_tokens]: equal hashes give equal blocks."""
        if self.block_hashes:
            blocks = np.array(self.block_hashes, np.uint64)
        else:
            num_blocks = math.ceil(self.num_prompt_tokens / self.block_tokens)
            blocks = np.arange(num_blocks, dtype=np.uint64) + np.uint64((self.number + 1) << 32)
        offsets = np.arange(self.block_tokens, dtype=np.uint64)
        positions = blocks[:, None] * np.uint64(self.block_tokens) + offsets
        tokens = _scramble(positions.ravel()) % np.uint64(VOCAB_SIZE - FIRST_TOKEN) + np.uint64(FIRST_TOKEN)
        return tokens[: self.num_prompt_tokens].astype(np.int32)


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """A way to write a trace.

    Attributes:
        columns: names by which a trace in this format is recognized.
        read: row |-> (time, prompt tokens, output tokens); the time in seconds from any origin.
        block_tokens: tokens of a block, or the column with it.
        hashes: the column with the hashes of the prompt's blocks; empty if there are none.
    """

    name: str
    columns: frozenset[str]
    read: Callable[[Row], tuple[float, int, int]]
    block_tokens: int | str = BLOCK_TOKENS
    hashes: str = ""


def _numbers(time_s: str, prompt: str, output: str, unit_s: float = 1.0) -> Callable[[Row], Any]:
    return lambda row: (float(row[time_s]) * unit_s, int(row[prompt]), int(row[output]))


def _azure(row: Row) -> tuple[float, int, int]:
    """Read a row of Azure's LLM inference traces, whose times have more digits than Python's."""
    date, _, fraction = row["TIMESTAMP"].partition(".")
    seconds = datetime.fromisoformat(f"{date}+00:00").timestamp() + float(f"0.{fraction.split('+')[0] or 0}")
    return seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"])


# The first whose columns a trace has.
FORMATS = (
    TraceFormat(
        "quire",
        frozenset({"arrival_s", "prompt_tokens", "output_tokens"}),
        _numbers("arrival_s", "prompt_tokens", "output_tokens"),
        "block_size",
        "prefix_block_hashes",
    ),
    TraceFormat("azure", frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), _azure),
    TraceFormat(
        "mooncake",
        frozenset({"timestamp", "input_length", "output_length"}),
        _numbers("timestamp", "input_length", "output_length", 1e-3),
        _MOONCAKE_BLOCK_TOKENS,
        "hash_ids",
    ),
    # BurstGPT's, which vLLM's benchmarks read.
    TraceFormat(
        "burstgpt",
        frozenset({"Timestamp", "Request tokens", "Response tokens"}),
        _numbers("Timestamp", "Request tokens", "Response tokens"),
    ),
)


class TraceFile:
    """A trace on disk, CSV or JSON lines, compressed or not. Each iteration reads it once, line by line.

    Args:
        limit: most requests; None for all.
        speed: arrivals come this many times as fast.

    Raises:
        ConfigError: the file cannot be read, or is in no known format.
    """

    def __init__(self, path: Path, limit: int | None = None, speed: float = 1.0) -> None:
        self.path, self._limit, self._speed = path, limit, speed
        first = next(iter(self), None)
        if first is None:
            raise ConfigError(f"{path} has no requests")
        self.shares_prefixes = bool(first.block_hashes)

    def __iter__(self) -> Iterator[TracedRequest]:
        """Yield the requests; the first arrives at 0, and no request arrives before the one above it.

        Raises:
            ConfigError: a line cannot be read.
        """
        with open_trace(self.path) as file:
            yield from islice(self._requests(file), self._limit)

    def _requests(self, file: IO[str]) -> Iterator[TracedRequest]:
        rows = _rows(self.path, file)
        first = next(rows, None)
        if first is None:
            return
        trace_format = _format_of(self.path, first)
        origin, latest = 0.0, 0.0
        for number, row in enumerate(chain((first,), rows)):
            try:
                time_s, num_prompt, num_output = trace_format.read(row)
                hashes = tuple(map(int, row.get(trace_format.hashes) or ())) if trace_format.hashes else ()
                size = trace_format.block_tokens
                block_tokens = size if isinstance(size, int) else int(row.get(size) or BLOCK_TOKENS)
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{self.path}, request {number + 1} cannot be read: {error!r}") from error
            origin = time_s if number == 0 else origin
            latest = max(latest, (time_s - origin) / self._speed)
            yield TracedRequest(number, latest, max(1, num_prompt), max(1, num_output), hashes, block_tokens)


@contextmanager
def open_trace(path: Path) -> Iterator[IO[str]]:
    """Open a file of text, compressed or not. Raises ConfigError if it cannot be read."""
    try:
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
            yield file
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path} cannot be read: {error}") from error


def _rows(path: Path, file: IO[str]) -> Iterator[Row]:
    if ".csv" in path.suffixes:
        yield from csv.DictReader(file)
        return
    for number, line in enumerate(file, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number} is not a JSON object")
        yield row


def _format_of(path: Path, row: Row) -> TraceFormat:
    found = next((each for each in FORMATS if each.columns <= row.keys()), None)
    if found is None:
        known = "; ".join(f"{each.name} ({', '.join(sorted(each.columns))})" for each in FORMATS)
        raise ConfigError(f"{path} has the columns {', '.join(map(str, row))}; known formats are {known}")
    return found


def _scramble(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash 64-bit numbers with the finalizer of SplitMix64 (Steele et al., OOPSLA 2014)."""
    x = values + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
