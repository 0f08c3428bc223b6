"""A tiny model and an LLM of it, for the tests of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire import LLM
from quire.scheduler.kv import stored_tier


@pytest.fixture(scope="module")
def model_dir(make_model: Callable[..., Path]) -> Path:
    return make_model("llama")


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    """Prompts of the tests are computed in chunks of at most 16 tokens, and at most eight sequences run at once."""
    settings = {"block_size": 4, "num_kv_blocks": 256, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    with LLM(str(model_dir), device="cpu", dtype="float32", **settings) as opened:
        yield opened


@pytest.fixture
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the key of stored KV, for this test alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def patient_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests wait for what is read, however long the reader's thread waits for a processor."""
    for name in ("MIN_WAIT_S", "MAX_WAIT_S"):
        monkeypatch.setattr(stored_tier, name, 60.0)
