"""Figures of the README: each number of its table is one of benchmarks/results."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"(?<![\w.])\d{1,3}(?:,\d{3})*(?:\.\d+)?")
W1, W3, W4 = "w1.output_tokens_per_s", "w3.decode_tokens_per_s", "w4.first_token_ms"
# What a row measures |-> the figures that its numbers round, in order: file, figure, and a factor of another unit.
SOURCES: dict[str, list[tuple[str, str] | tuple[str, str, float]]] = {
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
    "the same over HTTP, 1 and 16 streams": [
        ("http_servers", f"http_servers.{server}.{streams}.tokens_per_s")
        for server in ("quire", "vllm")
        for streams in (1, 16)
    ],
    "a gateway alone, 256 streams, gRPC and HTTP": [
        ("gateway", f"gateway.{protocol}.256.tokens_per_s") for protocol in ("grpc", "http")
    ],
    "`make demo`: two ranks, twelve streams": [("demo", "demo.throughput"), ("demo", "demo.ready")],
    "scheduler per step, 256 sequences running": [("scheduler", "scheduler.step_us.256.on", 1e-3)],
}


@cache
def figures(file: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())
    assert record["date"], f"{file} does not tell when it was measured"
    assert record["machine"], f"{file} does not tell where it was measured"
    found: dict[str, Any] = record["figures"]
    return found


def rows() -> dict[str, str]:
    """Return what each row of the table measures |-> its cells with numbers."""
    text = (ROOT / "README.md").read_text()
    section = re.search(r"^## Figures$(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    assert section is not None
    lines = [line for line in section[1].splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {name: " ".join(others) for name, *others in cells}


def test_table_has_the_rows_with_sources() -> None:
    assert set(rows()) == set(SOURCES)


@pytest.mark.parametrize("row", SOURCES)
def test_each_number_rounds_a_measured_figure(row: str) -> None:
    typed = NUMBER.findall(rows()[row])
    assert len(typed) == len(SOURCES[row]), f"{typed} have {len(SOURCES[row])} sources"
    for text, (file, name, *factor) in zip(typed, SOURCES[row], strict=True):
        value, plain = figures(file)[name]["value"] * (factor[0] if factor else 1.0), text.replace(",", "")
        _, _, decimals = plain.partition(".")
        unit = 10.0 ** -len(decimals)
        while unit < 1e9 and not decimals and plain.endswith("000"):  # written in thousands
            plain, unit = plain[:-3], unit * 1000
        error = abs(float(text.replace(",", "")) - value)
        assert error <= 0.5 * unit * (1 + 1e-9), f"{text} is {value:g} in {file}.json: {name}"
