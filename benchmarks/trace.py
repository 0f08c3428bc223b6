"""Traces of requests: arrival times, lengths of prompts and outputs, and shared prefixes.

A folder of traces holds ``*.csv`` and ``*.csv.gz`` files (``prompt_tokens``, ``output_tokens``, and ``arrival_s``
except in ``lengths_*``) and ``*.jsonl.gz`` files, which also have ``block_size`` and ``prefix_block_hashes``: one
integer per block of the prompt, equal if two prompts agree up to the end of that block.
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

# Standard deviation of the logarithm of drawn lengths.
LOG_SIGMA = 1.0
MAX_DRAWN_TOKENS = 1024


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
    paths = sorted([*folder.glob("*.csv"), *folder.glob("*.csv.gz"), *folder.glob("*.jsonl.gz")])
    if not paths:
        raise FileNotFoundError(f"no traces (*.csv, *.csv.gz, *.jsonl.gz) in {folder}")
    return [read_trace(path) for path in paths]


def read_trace(path: Path) -> Trace:
    """Read one file; requests without arrival times get those of a Poisson process."""
    rows = _json_rows(path) if ".jsonl" in path.suffixes else _csv_rows(path)
    requests = tuple(_request(number, row) for number, row in enumerate(rows))
    trace = Trace(path.name.split(".")[0], requests)
    return trace if requests[-1].arrival_s else with_poisson_arrivals(trace)


def with_poisson_arrivals(trace: Trace, seed: int = 0) -> Trace:
    """Return the trace with one arrival per second on average; `over` changes the rate."""
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(size=len(trace.requests))).tolist()
    requests = zip(trace.requests, arrivals, strict=True)
    return replace(trace, requests=tuple(replace(request, arrival_s=at) for request, at in requests))


def draw_lengths(name: str, mean_prompt: float, mean_output: float, count: int, seed: int = 0) -> Trace:
    """Return requests with log-normal lengths around given means, at most MAX_DRAWN_TOKENS each."""
    rng = np.random.default_rng(seed)
    prompts, outputs = (
        np.clip(mean * rng.lognormal(-(LOG_SIGMA**2) / 2, LOG_SIGMA, count), 1, MAX_DRAWN_TOKENS)
        for mean in (mean_prompt, mean_output)
    )
    lengths = zip(np.rint(prompts).astype(int).tolist(), np.rint(outputs).astype(int).tolist(), strict=True)
    requests = tuple(TracedRequest(number, 0.0, *pair) for number, pair in enumerate(lengths))
    return with_poisson_arrivals(Trace(name, requests), seed)


def _csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
        yield from csv.DictReader(file)


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        yield from map(json.loads, file)


def _request(number: int, row: dict[str, Any]) -> TracedRequest:
    shrink = int(row.get("block_size", BLOCK_TOKENS)) // BLOCK_TOKENS
    return TracedRequest(
        number,
        float(row.get("arrival_s", 0.0)),
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
