"""The bundled EAGLE-3 head of the demo model drafts what the demo model would write."""

from __future__ import annotations

import pytest

from quire import LLM, SamplingParams
from quire.cluster.config.engine_options import DEMO_HEAD_PATH
from quire.cluster.offline.in_process import InProcessEngine
from quire.scheduler.speculation.draft_lengths import DraftLengths

PROMPTS = ["It was the best of times, it was", "The whale", "My dear, said"]


def test_head_is_small() -> None:
    assert sum(path.stat().st_size for path in DEMO_HEAD_PATH.iterdir()) < 1 << 20


def test_demo_head_is_accepted_more_often_than_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps draft, whatever this machine's times say.
    monkeypatch.setattr(DraftLengths, "is_due", lambda self, num_rows: True)
    monkeypatch.setattr(DraftLengths, "_best", lambda self, rows, limits, most: limits.clip(0, 2))
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    config = {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 2}
    with LLM("demo", num_kv_blocks=64) as plain:
        expected = [list(output.outputs[0].token_ids) for output in plain.generate(PROMPTS, params)]
    with LLM("demo", num_kv_blocks=64, speculative_config=config) as drafted:
        outputs = [list(output.outputs[0].token_ids) for output in drafted.generate(PROMPTS, params)]
        assert isinstance(drafted._engine, InProcessEngine)
        stats = drafted._engine.scheduler.stats
    assert outputs == expected
    assert sum(stats.num_accepted) > 0.5 * stats.num_draft_tokens > 0
