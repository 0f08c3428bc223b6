"""A tiny model and an LLM of it, for the tests of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire import LLM


@pytest.fixture(scope="module")
def model_dir(make_model: Callable[..., Path]) -> Path:
    return make_model("llama")


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    """Prompts of the tests are computed in chunks of at most 16 tokens, and at most eight sequences run at once."""
    settings = {"block_size": 4, "num_kv_blocks": 256, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    with LLM(str(model_dir), device="cpu", dtype="float32", **settings) as opened:
        yield opened
