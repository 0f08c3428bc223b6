"""The option speculative_config: vLLM's keys, defaults, and errors that name the key."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.config.speculative_options import MAX_SPECULATIVE_TOKENS
from quire.proto.config import SpeculativeConfig
from quire.proto.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"method": "ngram"}, SpeculativeConfig("ngram", 5, 2, None)),
        ({"model": "ngram", "num_speculative_tokens": 3}, SpeculativeConfig("ngram", 3, 2, None)),
        ({"model": "[ngram]", "prompt_lookup_max": 4}, SpeculativeConfig("ngram", 5, 2, 4)),
        ({"method": "ngram", "prompt_lookup_max": 1}, SpeculativeConfig("ngram", 5, 1, 1)),
        ({"method": "ngram", "prompt_lookup_min": 3, "model": None}, SpeculativeConfig("ngram", 5, 3, None)),
    ],
)
def test_object_and_text_reach_the_replica(given: dict[str, Any], expected: SpeculativeConfig) -> None:
    for value in (given, json.dumps(given)):
        options = EngineOptions("demo", speculative_config=value)  # type: ignore[arg-type]
        assert resolve(options, Machine(1, 0)).speculative == expected


def test_draft_model_reaches_the_replica(make_model: Any) -> None:
    target, draft = (str(make_model("llama", seed=seed)) for seed in (1, 2))
    given: Any = {"model": draft, "num_speculative_tokens": 3}
    speculative = resolve(EngineOptions(target, speculative_config=given), Machine(1, 0)).speculative
    assert speculative is not None
    assert speculative.method == "draft_model"
    assert speculative.draft is not None
    assert (speculative.draft.path, speculative.draft.dtype) == (draft, "float32")


def test_draft_model_of_another_vocabulary_is_refused(make_model: Any) -> None:
    given: Any = {"model": str(make_model("llama")), "method": "draft_model"}
    with pytest.raises(ConfigError, match="tokens in its vocabulary, must have the 3072 of demo"):
        resolve(EngineOptions("demo", speculative_config=given), Machine(1, 0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "speculative_config is '{', must be a JSON object"),
        ("[]", r"speculative_config is '\[\]', must be a JSON object"),
        (3, "speculative_config is 3, must be a JSON object"),
        ({"method": "medusa"}, "speculative_config: method is 'medusa', must be ngram or draft_model"),
        ({}, "speculative_config: model is None, must name the draft model"),
        ({"method": "draft_model", "model": 3}, "speculative_config: model is 3, must name the draft model"),
        ({"method": "ngram", "num_tokens": 3}, "there is no option 'num_tokens' of speculative_config"),
        (
            {"method": "ngram", "num_speculative_tokens": 0},
            "num_speculative_tokens is 0, must be a whole number from",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": MAX_SPECULATIVE_TOKENS + 1},
            "num_speculative_tokens is 33, must be a whole number from 1 to 32",
        ),
        ({"method": "ngram", "prompt_lookup_max": True}, "prompt_lookup_max is True, must be a whole number"),
        (
            {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_min is 4, must be at most prompt_lookup_max, 3",
        ),
    ],
)
def test_wrong_object_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions("demo", speculative_config=given)
