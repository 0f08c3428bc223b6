"""Figures of `python -m benchmarks.memory` on a few requests."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.memory import BLOCK_SIZES, BUNDLED, Extent, jobs, lru_hit_rate, measure_windows, shorten
from benchmarks.replay import replay
from benchmarks.trace import Trace, TracedRequest, read_traces

ROOT = Path(__file__).parents[2]
FEW = ("azure_conv_2023", "coding_multiturn", "lengths_sharegpt_8k")


def test_lru_hit_rate_evicts_the_last_blocks_of_a_prompt_first() -> None:
    trace = Trace(
        "x", tuple(TracedRequest(i, 0.0, 1, 1, row) for i, row in enumerate([(1, 2, 3), (4,), (1, 2, 3)]))
    )
    assert lru_hit_rate(trace, num_blocks=100) == pytest.approx(3 / 7)
    assert lru_hit_rate(trace, num_blocks=3) == pytest.approx(2 / 7)


def test_windows_save_the_tokens_behind_them() -> None:
    figures = measure_windows("gpt-oss-20b")  # half of the layers hold 128 of 8,192 tokens
    assert figures["memory.windows.gpt-oss-20b.8192"].value == pytest.approx(2 / (1 + 128 / 8192))
    assert list(measure_windows("gemma-2-9b")) == ["memory.windows.gemma-2-9b.8192"]


@pytest.mark.parametrize("num_blocks", [6, 9, 14, 30, 100])
def test_replay_of_prompts_alone_hits_like_an_lru_cache(num_blocks: int) -> None:
    rng = np.random.default_rng(num_blocks)
    chains = []
    for _ in range(200):  # prompts are paths in a tree: a block's hash covers all turns up to it
        turns = rng.integers(0, 3, rng.integers(1, 6)).tolist()
        chains.append(tuple(hash(tuple(turns[: i + 1])) % 10**9 for i in range(len(turns))))
    # One token more than full blocks: that token is always computed, and its block is reused at once.
    served = [TracedRequest(i, 0.0, 16 * len(row) + 1, 1, (*row, 10**9 + i)) for i, row in enumerate(chains)]
    full = [TracedRequest(i, 0.0, 16 * len(row), 1, row) for i, row in enumerate(chains)]
    outcome = replay(Trace("served", tuple(served)).one_at_a_time(), num_blocks)
    num_hits = sum(finish.num_cached_tokens for finish in outcome.finishes) // 16
    expected = lru_hit_rate(Trace("full", tuple(full)), num_blocks - 1)
    assert num_hits / sum(map(len, chains)) == pytest.approx(expected)
    assert 0.0 < expected < 1.0


@pytest.fixture(scope="module")
def figures() -> dict[str, float]:
    measured: dict[str, float] = {}
    traces = [trace for trace in read_traces(BUNDLED) if trace.name in FEW]
    for job in jobs(traces, Extent(most_requests=3, most_output_tokens=600, num_beams=4)):
        measured |= {name: figure.value for name, figure in job().items()}
    return measured


def test_waste_grows_with_block_size_and_is_below_contiguous_memory(
    figures: dict[str, float],
) -> None:
    for trace in ("alpaca", "azure_conv_2023", "lengths_sharegpt_8k"):
        waste = [figures[f"memory.waste.{trace}.{block_size}"] for block_size in BLOCK_SIZES]
        assert waste == sorted(waste)
        assert 0 < waste[0] < figures[f"memory.waste.{trace}.contiguous_pow2"]


def test_sharing_saves_more_with_more_sequences(figures: dict[str, float]) -> None:
    for kind in ("n", "beam"):
        saved = [figures[f"memory.saved.{kind}.{width}.lengths_sharegpt_8k"] for width in (2, 4, 6)]
        assert saved == sorted(saved)
        assert 0 < saved[0] < 50
        assert saved[2] < 100 * 5 / 6


def test_multi_turn_prompts_hit_the_cache(figures: dict[str, float]) -> None:
    assert figures["memory.hit_rate.coding_multiturn"] > 50
    assert figures["memory.hit_rate.coding_multiturn.lru.64k"] > 50


def test_shorten_limits_requests_and_tokens() -> None:
    trace = Trace("x", tuple(TracedRequest(i, 0.0, 1, 100) for i in range(10)))
    assert len(shorten(trace, Extent(4, 10_000, 1)).requests) == 4
    assert len(shorten(trace, Extent(4, 250, 1)).requests) == 2
    assert len(shorten(trace, Extent(4, 5, 1)).requests) == 1


@pytest.mark.slow
def test_command_writes_its_figures(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    command = [sys.executable, "-m", "benchmarks.memory", "--quick", "--json", str(path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=250, stdout=subprocess.DEVNULL)
    record = json.loads(path.read_text())
    assert record["figures"]["memory.waste.alpaca.16"]["unit"] == "%"
