"""Traces of requests: arrival times, lengths of prompts and outputs, and shared prefixes.

A folder of traces holds ``*.csv.gz`` files (``prompt_tokens``, ``output_tokens``, ``arrival_s``) and ``*.jsonl.gz``
files, which also have ``block_size`` and ``prefix_block_hashes``: one integer per block of the prompt, equal if two
prompts agree up to the end of that block.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.proto.block_tables import IntArray

# Prompts are built from blocks of this many tokens. Lengths of a trace with larger blocks are scaled down to it: the
# same blocks are shared, and a small context is enough.
BLOCK_TOKENS = 16
VOCAB_SIZE = 32_000
FIRST_TOKEN = 10  # smaller ids are special in most models


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace.

    Attributes:
        number: its position in the trace, from 0.
        block_hashes: identity of each block of BLOCK_TOKENS prompt tokens, of which the last may be partial; empty
            if the prompt shares no block.
    """

    number: int
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_hashes: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    def prompt(self) -> IntArray:
        """Return random token ids, [num_prompt_tokens]: equal hashes give equal blocks."""
        num_blocks = math.ceil(self.num_prompt_tokens / BLOCK_TOKENS)
        if self.block_hashes:
            blocks = np.array(self.block_hashes, np.uint64)
        else:
            blocks = np.arange(num_blocks, dtype=np.uint64) + np.uint64((self.number + 1) << 32)
        positions = blocks[:, None] * np.uint64(BLOCK_TOKENS) + np.arange(BLOCK_TOKENS, dtype=np.uint64)
        tokens = _scramble(positions.ravel()) % np.uint64(VOCAB_SIZE - FIRST_TOKEN) + np.uint64(FIRST_TOKEN)
        return tokens[: self.num_prompt_tokens].astype(np.int32)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    requests: tuple[TracedRequest, ...]

    @property
    def shares_prefixes(self) -> bool:
        return bool(self.requests[0].block_hashes)

    @property
    def max_tokens(self) -> int:
        """Return the tokens of the longest request, prompt and output."""
        return max(request.num_tokens for request in self.requests)

    def first(self, count: int) -> Trace:
        return replace(self, requests=self.requests[:count])

    def over(self, seconds: float) -> Trace:
        """Return the trace with arrival times scaled to end after `seconds`."""
        factor = seconds / (self.requests[-1].arrival_s or 1.0)
        requests = (replace(request, arrival_s=request.arrival_s * factor) for request in self.requests)
        return replace(self, requests=tuple(requests))

    def one_at_a_time(self) -> Trace:
        """Return the trace with each prompt alone, with an output of one token, in the same order."""
        requests = (
            replace(request, arrival_s=1e6 * request.number, num_output_tokens=1) for request in self.requests
        )
        return replace(self, requests=tuple(requests))


def read_traces(folder: Path) -> list[Trace]:
    """Read all traces of a folder, in order of their names.

    Raises:
        FileNotFoundError: the folder has no traces.
    """
    paths = sorted([*folder.glob("*.csv.gz"), *folder.glob("*.jsonl.gz")])
    if not paths:
        raise FileNotFoundError(f"no traces (*.csv.gz, *.jsonl.gz) in {folder}")
    return [read_trace(path) for path in paths]


def read_trace(path: Path) -> Trace:
    """Read one file."""
    rows = _json_rows(path) if ".jsonl" in path.suffixes else _csv_rows(path)
    return Trace(path.name.split(".")[0], tuple(_request(number, row) for number, row in enumerate(rows)))


def _csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", newline="") as file:
        yield from csv.DictReader(file)


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        yield from map(json.loads, file)


def _request(number: int, row: dict[str, Any]) -> TracedRequest:
    shrink = int(row.get("block_size", BLOCK_TOKENS)) // BLOCK_TOKENS
    return TracedRequest(
        number,
        float(row["arrival_s"]),
        math.ceil(int(row["prompt_tokens"]) / shrink),
        max(1, int(row["output_tokens"])),
        tuple(row.get("prefix_block_hashes", ())),
    )


def _scramble(values: np.ndarray) -> np.ndarray:
    """Hash 64-bit numbers with the finalizer of SplitMix64 (Steele et al., OOPSLA 2014)."""
    x = values + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
