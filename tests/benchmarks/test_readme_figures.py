"""Figures of the README: numbers, day, processor and commit of each row are those of benchmarks/results."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"(?<![\w.])\d{1,3}(?:,\d{3})*(?:\.\d+)?")
W1, W3, W4 = "w1.output_tokens_per_s", "w3.decode_tokens_per_s", "w4.first_token_ms"
# What a row measures |-> the figures that its numbers round, in order: file, figure, and a factor of another unit.
SOURCES: dict[str, list[tuple[str, str] | tuple[str, str, float]]] = {
    "60M-parameter Llama in bfloat16, 64 requests at once": [
        ("offline_amx", f"peers.{engine}.{W1}") for engine in ("quire", "vllm", "transformers")
    ],
    "in bfloat16, single stream": [
        ("offline_amx", f"peers.{engine}.{W3}") for engine in ("quire", "vllm", "transformers")
    ],
    "in bfloat16, prompt of 1,024 tokens": [
        ("offline_amx", f"peers.{engine}.{W4}") for engine in ("quire", "vllm", "transformers")
    ],
    "60M-parameter Llama, 64 requests at once": [
        ("offline_peers", f"peers.{engine}.{W1}") for engine in ("quire", "vllm", "llama_cpp", "transformers")
    ],
    "the same, single stream": [
        ("offline_peers", f"peers.{engine}.{W3}") for engine in ("quire", "llama_cpp", "ctranslate2", "vllm")
    ],
    "the same, prompt of 1,024 tokens": [
        ("offline_peers", f"peers.{engine}.{W4}") for engine in ("quire", "vllm", "llama_cpp", "ctranslate2")
    ],
    "the same on two ranks, 64 requests and single stream": [
        ("offline_peers_tp2", f"peers.{engine}.{figure}")
        for engine in ("quire", "vllm")
        for figure in (W1, W3)
    ],
    "the same with AVX2 only, 64 requests and single stream": [
        ("offline_peers_avx2", f"peers.{engine}.{figure}")
        for engine in ("quire", "vllm")
        for figure in (W1, W3)
    ],
    "60M-parameter Llama over HTTP, 1 and 16 streams": [
        ("http_servers", f"http_servers.{server}.{streams}.tokens_per_s")
        for server in ("quire", "vllm")
        for streams in (1, 16)
    ],
    "a gateway alone, 256 streams, gRPC and HTTP": [
        ("gateway", f"gateway.{protocol}.256.tokens_per_s") for protocol in ("grpc", "http")
    ],
    "scheduler per step, 256 sequences running": [("scheduler", "scheduler.step_us.256.on", 1e-3)],
    "an hour in which ranks, schedulers and gateways are killed": [
        ("soak", f"soak.{figure}") for figure in ("requests", "faults", "problems")
    ],
}


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        measured_on: the line above the table: the day and the processor.
    """

    measured_on: str
    cells: str
    commit: str


@cache
def result(file: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())
    return record


def rows() -> dict[str, Row]:
    """Return what each row of the tables measures |-> the row."""
    text = (ROOT / "README.md").read_text()
    section = re.search(r"^## Figures$(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    assert section is not None
    found: dict[str, Row] = {}
    for measured_on, table in re.findall(r"^([^|\n]+):\n\n((?:\|.*\n)+)", section[1], re.MULTILINE):
        for line in table.splitlines()[2:]:
            name, *numbers, commit = [cell.strip() for cell in line.strip("|").split("|")]
            found[name] = Row(measured_on, " ".join(numbers), commit.strip("`"))
    return found


def test_tables_have_the_rows_with_sources() -> None:
    assert set(rows()) == set(SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_row_says_when_where_and_what_was_measured(name: str) -> None:
    row = rows()[name]
    for record in (result(file) for file, *_ in SOURCES[name]):
        processor, _, _ = record["machine"].partition(",")
        assert row.measured_on == f"{record['date']}, {processor}"
        assert row.commit == record["commit"]


@pytest.mark.parametrize("name", SOURCES)
def test_each_number_rounds_a_measured_figure(name: str) -> None:
    typed = NUMBER.findall(rows()[name].cells)
    assert len(typed) == len(SOURCES[name]), f"{typed} have {len(SOURCES[name])} sources"
    for text, (file, figure, *factor) in zip(typed, SOURCES[name], strict=True):
        value = result(file)["figures"][figure]["value"] * (factor[0] if factor else 1.0)
        plain = text.replace(",", "")
        _, _, decimals = plain.partition(".")
        unit = 10.0 ** -len(decimals)
        while unit < 1e9 and not decimals and plain.endswith("000"):  # written in thousands
            plain, unit = plain[:-3], unit * 1000
        error = abs(float(text.replace(",", "")) - value)
        assert error <= 0.5 * unit * (1 + 1e-9), f"{text} is {value:g} in {file}.json: {figure}"
