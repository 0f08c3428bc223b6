"""The bundled head and the bundled smaller model draft what the demo model would write."""

from __future__ import annotations

import pytest

from benchmarks.draft_lengths import fixed_lengths
from quire import LLM, SamplingParams
from quire.cluster.config.engine_options import DEMO_DRAFT_PATH, DEMO_HEAD_PATH
from quire.cluster.offline.in_process import InProcessEngine

PROMPTS = ["It was the best of times, it was", "The whale", "My dear, said"]


def test_head_and_draft_model_are_small() -> None:
    for folder, most_bytes in ((DEMO_HEAD_PATH, 1 << 20), (DEMO_DRAFT_PATH, 3 << 19)):
        assert sum(path.stat().st_size for path in folder.iterdir()) < most_bytes


@pytest.mark.parametrize(
    ("method", "model", "least"), [("eagle3", "demo-eagle3", 0.5), ("draft_model", "demo-draft", 0.3)]
)
def test_drafts_for_the_demo_model_are_accepted(method: str, model: str, least: float) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    config = {"method": method, "model": model, "num_speculative_tokens": 2}
    with LLM("demo", num_kv_blocks=64) as plain:
        expected = [list(output.outputs[0].token_ids) for output in plain.generate(PROMPTS, params)]
    with fixed_lengths(2), LLM("demo", num_kv_blocks=64, speculative_config=config) as drafted:
        outputs = [list(output.outputs[0].token_ids) for output in drafted.generate(PROMPTS, params)]
        assert isinstance(drafted._engine, InProcessEngine)
        stats = drafted._engine.scheduler.stats
    assert outputs == expected
    assert sum(stats.num_accepted) > least * stats.num_draft_tokens > 0
