"""Pooled prompts on the ranks: beside generation, in chunks, on each number of ranks, with the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pooling_models import EmbeddingReference
from ranked_driver import RankedDriver
from reference import Reference, prompts_of

from quire.proto.config import PoolingConfig
from quire.proto.pooling import PoolingParams

PROMPTS = prompts_of([5, 21, 34, 1, 13, 28], seed=2)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(make_model: Callable[..., Path]) -> Path:
    return make_model("llama", seed=4)


@pytest.mark.parametrize(("tp", "pooling_type"), [(1, "mean"), (2, "last"), (4, "mean")])
def test_pooled_prompts_beside_generation_equal_transformers(
    folder: Path, make_engine: Any, tp: int, pooling_type: str
) -> None:
    """In steps of 12 tokens, with a pool that is too small for all, so that some are preempted."""
    pooling = PoolingConfig(pooling_type, 64, activation="normalize")
    settings = {"block_size": 4, "max_num_batched_tokens": 12, "max_model_len": 60, "max_num_seqs": 4}
    engine = make_engine(folder, tp, num_blocks=16, pooling=pooling, **settings)
    driver = RankedDriver(engine.config.with_num_blocks(16), engine.step)
    for handle, prompt in enumerate(PROMPTS):
        driver.add(2 * handle, prompt, pooling=PoolingParams())
        driver.add(2 * handle + 1, prompt, max_tokens=9, ignore_eos=True)
    driver.run(depth=2)
    embeddings, tokens = EmbeddingReference(folder), Reference(folder)
    mode = {"last": "lasttoken", "mean": "mean_tokens"}[pooling_type]
    for handle, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(driver.vectors[2 * handle], embeddings.embed(prompt, mode), atol=TOLERANCE)
        tokens.check_greedy(prompt, driver.outputs[2 * handle + 1])
    assert driver.scheduler.stats.num_preemptions > 0
    mixed = [plan for plan in driver.plans if len({*plan.chunk_rows.tolist()}) > 1]
    assert mixed, "no step had several prompts"
