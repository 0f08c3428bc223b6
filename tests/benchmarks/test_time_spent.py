"""The time of a workload by where it goes: the parts add up, and the limits are those of the model's sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from benchmarks.offline import MAX_MODEL_LEN, time_batch
from benchmarks.time_spent import PARTS, Limits, ModelSize, Recorder, Spent, measure_two_ranks
from quire import LLM
from quire.worker.step.batch import Batch

LIMITS = Limits(flops=1e9, read=1e9)
REQUESTS = [([5, 6, 7, 8], 3), (list(range(10, 40)), 2)]


def batch(num_sampled: int, *contexts: tuple[int, int]) -> Batch:
    """Return a batch of rows with (computed, new) tokens."""
    positions = torch.cat([torch.arange(computed, computed + new) for computed, new in contexts])
    lens = np.array([computed + new for computed, new in contexts])
    rows = np.arange(len(lens))
    no_ints = np.zeros(0, np.int32)
    return Batch(
        rows,
        lens,
        positions.int(),
        positions,
        0,
        cast("Any", None),
        rows[:num_sampled],
        lens[:num_sampled],
        False,
        None,
        None,
        rows[:0],
        positions[:0].numpy(),
        rows[:0],
        no_ints,
        no_ints,
    )


def test_limits_are_arithmetic_for_many_tokens_and_memory_for_few() -> None:
    size = ModelSize(layers=1000, last=300, head=100, kv=10, attention=20, itemsize=4, num_layers=2)
    # Of two layers, the last one computes nothing but keys and values: no row samples.
    linear, attention = 2 * 64 * 700 / 1e9, 64 * 65 // 2 * 20 / 1e9
    assert LIMITS.seconds(size, batch(0, (0, 64))) == pytest.approx((linear + attention, 0.0))
    linear, attention = 4 * (1000 + 100) / 1e9, 2 * 51 * 20 / 1e9
    kv = 4 * 10 * 51 / 1e9
    assert LIMITS.seconds(size, batch(1, (50, 1))) == pytest.approx((0.0, linear + max(attention, kv)))


def test_size_of_the_demo_model(demo_model_dir: Path) -> None:
    with LLM(str(demo_model_dir), device="cpu", num_kv_blocks=8) as llm:
        size, model = ModelSize.of(llm.config), llm.config.model
    assert size.kv == 2 * model.num_layers * model.num_kv_heads * model.head_dim
    assert size.attention == 2 * model.num_layers * model.num_heads * model.head_dim
    hidden_size = json.loads((demo_model_dir / "config.json").read_text())["hidden_size"]
    assert size.head == model.vocab_size * hidden_size
    assert size.layers > model.num_layers * hidden_size**2
    per_layer = size.layers // model.num_layers
    assert per_layer // 2 < size.last < per_layer
    assert size.num_layers == model.num_layers
    assert size.itemsize == 4


def record(folder: Path) -> tuple[Spent, list[bytes], int]:
    with LLM(str(folder), device="cpu", max_model_len=MAX_MODEL_LEN) as llm:
        recorder = Recorder(LIMITS, ModelSize.of(llm.config))
        with recorder.installed():
            recorder.spent.wall = time_batch(llm, REQUESTS)
        assert llm.config.cache.num_blocks is not None
        return recorder.spent, recorder.plans, llm.config.cache.num_blocks


def test_parts_add_up_to_the_wall_time(make_model: Any) -> None:
    spent, plans, _ = record(make_model("llama", max_position_embeddings=MAX_MODEL_LEN))
    figures = spent.figures("time_spent.tp1.w1")
    assert spent.num_steps == len(plans) >= 3
    parts = [figures[f"time_spent.tp1.w1.{part}_s"].value for part in PARTS]
    assert sum(parts) == pytest.approx(figures["time_spent.tp1.w1.wall_s"].value)
    assert all(
        figures[f"time_spent.tp1.w1.{part}_s"].value > 0 for part in ("arithmetic", "sample", "scheduler")
    )


@pytest.mark.slow  # starts a process with torch and its compiler
def test_two_ranks_execute_the_plans_of_one(make_model: Any) -> None:
    folder = make_model("llama", max_position_embeddings=MAX_MODEL_LEN)
    spent, plans, num_blocks = record(folder)
    two = measure_two_ranks(folder, "float32", LIMITS, [("w1", plans)], num_blocks)["w1"]
    assert two.num_steps == spent.num_steps
    assert two.all_reduce > 0
    assert two.arithmetic + two.memory == pytest.approx(spent.arithmetic + spent.memory)
