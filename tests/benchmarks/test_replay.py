"""Traces, and their replay in simulated time with the measurements of memory."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.replay import MemoryWatch, Roofline, replay
from benchmarks.trace import Trace, TracedRequest, draw_lengths, read_trace
from quire.proto.sampling import SamplingParams


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
    assert read.requests == (TracedRequest(0, 2.5, 33, 7, (0, 1, 2)),)


def test_lengths_without_arrivals_arrive_at_random(tmp_path: Path) -> None:
    path = tmp_path / "lengths_x.csv"
    path.write_text("prompt_tokens,output_tokens\n" + "10,2\n" * 400)
    arrivals = [request.arrival_s for request in read_trace(path).requests]
    gaps = np.diff(arrivals)
    assert (gaps > 0).all()
    assert 0.8 < gaps.mean() < 1.2
    assert read_trace(path).over(5.0).requests[-1].arrival_s == pytest.approx(5.0)


def test_drawn_lengths_have_the_given_means() -> None:
    drawn = draw_lengths("x", 20.0, 60.0, count=4000).requests
    assert np.mean([request.num_prompt_tokens for request in drawn]) == pytest.approx(20.0, rel=0.05)
    assert np.mean([request.num_output_tokens for request in drawn]) == pytest.approx(60.0, rel=0.05)


def test_every_request_finishes_with_the_length_of_the_trace() -> None:
    lengths = [(int(p), int(o)) for p, o in np.random.default_rng(0).integers(1, 90, (40, 2))]
    outcome = replay(trace(*lengths, apart_s=0.01), num_blocks=60)
    finished = sorted((finish.num_prompt_tokens, finish.num_completion_tokens) for finish in outcome.finishes)
    assert finished == sorted(lengths)
    assert outcome.num_preemptions > 0, "the pool is meant to be too small for all"


def test_replay_is_deterministic() -> None:
    once, again = (replay(draw_lengths("x", 50.0, 30.0, 20), num_blocks=100) for _ in range(2))
    assert (once.waste, once.memory.seconds, once.num_steps) == (
        again.waste,
        again.memory.seconds,
        again.num_steps,
    )
    assert once.finishes == again.finishes


def test_requests_larger_than_the_pool_are_left_out() -> None:
    outcome = replay(trace((500, 2), (20, 2)), num_blocks=8)
    assert (len(outcome.finishes), outcome.num_left_out) == (1, 1)


def test_step_time_follows_the_roofline() -> None:
    outcome, machine = replay(trace((100, 3)), num_blocks=100), Roofline()
    steps = machine.step_s(100, 100) + machine.step_s(1, 101) + machine.step_s(1, 102)
    assert outcome.memory.seconds == pytest.approx(steps)
    assert machine.step_s(1, 0) == pytest.approx(16e9 / 3.35e12)  # limited by reading the weights
    assert machine.step_s(10_000, 0) == pytest.approx(10_000 * 16e9 / 600e12)  # limited by arithmetic


def test_waste_is_the_unused_part_of_the_last_block() -> None:
    assert replay(trace((17, 1)), num_blocks=10).waste == pytest.approx(15 / 32)
    assert replay(trace((17, 1)), num_blocks=10, block_size=8).waste == pytest.approx(7 / 24)


def test_parallel_sampling_saves_the_full_blocks_of_the_prompt() -> None:
    # One sequence runs alone during the prefill; then four tables of five blocks share four.
    request = trace((65, 15))
    outcome = replay(request, num_blocks=100, sampling=SamplingParams(n=4))
    assert 0.5 < outcome.saved < 1 - (4 + 4) / 20
    assert replay(request, num_blocks=100).saved == pytest.approx(0.0)


@pytest.mark.parametrize("sampling", [SamplingParams(n=3), SamplingParams(beam_width=3)])
def test_held_blocks_equal_the_unique_blocks_of_the_tables(
    sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = MemoryWatch.add

    def recount(watch: MemoryWatch, seconds: float) -> None:
        tables = watch.scheduler.blocks.tables
        held = np.concatenate([tables.row(row) for row in range(tables.lens.size)])
        assert watch.scheduler.blocks.num_held_blocks == np.unique(held).size
        watch.scheduler.check_integrity()
        count(watch, seconds)

    monkeypatch.setattr(MemoryWatch, "add", recount)
    outcome = replay(draw_lengths("x", 40.0, 20.0, 12), num_blocks=40, num_rows=8, sampling=sampling)
    assert 0.0 < outcome.saved < 2 / 3


def test_one_at_a_time_trace_never_queues() -> None:
    alone = draw_lengths("x", 50.0, 30.0, 10).one_at_a_time()
    assert replay(alone, num_blocks=100).mean_running == pytest.approx(1.0)
