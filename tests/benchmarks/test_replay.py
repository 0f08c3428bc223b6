"""Traces, their replay in simulated time, and the figures of `benchmarks.memory`."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.memory import lru_hit_rate, measure_windows
from benchmarks.replay import replay, roofline
from benchmarks.trace import Trace, read_trace
from quire.cluster.simulation.traces import TracedRequest
from quire.scheduler import StepWork


def trace(*lengths: tuple[int, int], apart_s: float = 0.0) -> Trace:
    """Return a trace of requests with (prompt tokens, output tokens)."""
    requests = (TracedRequest(i, i * apart_s, *pair) for i, pair in enumerate(lengths))
    return Trace("made", tuple(requests))


def test_prompts_with_equal_leading_hashes_share_that_prefix() -> None:
    one = TracedRequest(0, 0.0, 40, 1, block_hashes=(5, 6, 7)).prompt()
    two = TracedRequest(1, 0.0, 48, 1, block_hashes=(5, 6, 8)).prompt()
    assert one.size == 40
    assert (one[:32] == two[:32]).all()
    assert not (one[32:] == two[32:40]).any()


def test_prompts_without_hashes_share_nothing() -> None:
    one, two = (TracedRequest(number, 0.0, 100, 1).prompt() for number in range(2))
    assert (one != two).mean() > 0.95


def test_trace_with_large_blocks_is_scaled_down(tmp_path: Path) -> None:
    row = {"arrival_s": 2.5, "prompt_tokens": 1025, "output_tokens": 7, "block_size": 512}
    path = tmp_path / "chat.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(row | {"prefix_block_hashes": [0, 1, 2]}) + "\n")
    read = read_trace(path)
    assert read.name == "chat"
    assert read.requests == (TracedRequest(0, 0.0, 33, 7, (0, 1, 2)),)


def test_every_request_finishes_with_the_length_of_the_trace() -> None:
    lengths = [(int(p), int(o)) for p, o in np.random.default_rng(0).integers(1, 90, (40, 2))]
    outcome = replay(trace(*lengths, apart_s=0.01), num_blocks=60)
    finished = sorted((each.traced.num_prompt_tokens, each.num_received) for each in outcome.requests)
    assert finished == sorted(lengths)
    assert outcome.num_preemptions > 0, "the pool is meant to be too small for all"


def test_replay_is_deterministic() -> None:
    lengths = [(40 + 3 * number, 20 + number) for number in range(20)]
    assert replay(trace(*lengths), num_blocks=100) == replay(trace(*lengths), num_blocks=100)


def test_requests_larger_than_the_pool_are_left_out() -> None:
    outcome = replay(trace((500, 2), (20, 2)), num_blocks=8)
    assert (len(outcome.requests), outcome.num_left_out) == (1, 1)


def test_step_time_follows_the_roofline() -> None:
    outcome, machine = replay(trace((100, 3)), num_blocks=100), roofline()
    works = StepWork(100, 1, 100), StepWork(1, 1, 101), StepWork(1, 1, 102)
    assert outcome.seconds == pytest.approx(sum(map(machine.seconds, works)))
    assert machine.seconds(StepWork(1, 1, 0)) == pytest.approx(16e9 / 3.35e12)  # limited by the weights
    assert machine.seconds(StepWork(10_000, 1, 0)) == pytest.approx(10_000 * 16e9 / 600e12)  # by arithmetic


def test_one_at_a_time_trace_never_queues() -> None:
    alone = trace(*[(50, 30)] * 10).one_at_a_time()
    assert replay(alone, num_blocks=100).mean_running == pytest.approx(1.0)


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
    num_hits = sum(each.num_cached_tokens for each in outcome.requests) // 16
    expected = lru_hit_rate(Trace("full", tuple(full)), num_blocks - 1)
    assert num_hits / sum(map(len, chains)) == pytest.approx(expected)
    assert 0.0 < expected < 1.0
