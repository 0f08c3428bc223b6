"""Trace files: formats of others, shared prefixes, and what cannot be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from quire.cluster.simulation.traces import TracedRequest, TraceFile
from quire.proto.errors import ConfigError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.1805900,396,109
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
7.5,GPT-4,1087,230,1317,API log
"""


def test_azure_times_are_relative_to_the_first_request(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    first, second = TraceFile(path)
    assert (first.arrival_s, first.num_prompt_tokens, first.num_output_tokens) == (0.0, 374, 44)
    assert second.arrival_s == pytest.approx(0.5)


def test_burstgpt_is_read_and_squeezed(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write(BURSTGPT)
    assert [each.arrival_s for each in TraceFile(path, speed=2.0)] == [0.0, 1.25]
    assert not TraceFile(path).shares_prefixes


def test_mooncake_blocks_are_shared_at_their_own_size(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1300, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 7]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = TraceFile(path)
    first, second = trace
    assert trace.shares_prefixes
    assert second.arrival_s == 3.0
    assert (first.prompt().size, second.prompt().size) == (1300, 1100)
    assert (first.prompt()[:1024] == second.prompt()[:1024]).all()
    assert (first.prompt()[1024:1100] != second.prompt()[1024:]).any()


def test_trace_is_read_again_by_each_iteration_and_stops_at_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    trace = TraceFile(path, limit=1)
    assert list(trace) == list(trace) == [TracedRequest(0, 0.0, 374, 44)]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("x.csv", "when,what\n1,2\n", "has the columns when, what; known formats are quire"),
        ("x.csv", "arrival_s,prompt_tokens,output_tokens\n1,2,three\n", "request 1 cannot be read"),
        ("x.jsonl", "{\n", "line 1 is not JSON"),
        ("x.jsonl", "", "has no requests"),
    ],
)
def test_unreadable_trace_names_the_place(tmp_path: Path, name: str, text: str, problem: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        TraceFile(path)


def test_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        TraceFile(tmp_path / "absent.csv")
