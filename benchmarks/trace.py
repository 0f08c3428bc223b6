"""Traces of requests in memory, for benchmarks that change them: see `quire.cluster.simulation.traces`.

Lengths of a trace with blocks of more than BLOCK_TOKENS tokens are scaled down to these: the same blocks are shared,
and a small context is enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from quire.cluster.simulation.traces import BLOCK_TOKENS, TracedRequest, TraceFile


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
    return Trace(path.name.split(".")[0], tuple(map(_scaled_down, TraceFile(path))))


def _scaled_down(request: TracedRequest) -> TracedRequest:
    shrink = request.block_tokens // BLOCK_TOKENS
    num_prompt_tokens = math.ceil(request.num_prompt_tokens / shrink)
    return replace(request, num_prompt_tokens=num_prompt_tokens, block_tokens=BLOCK_TOKENS)
