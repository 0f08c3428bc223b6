"""The option speculative_config: vLLM's keys, defaults, and errors that name the key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draft_heads import add_mtp, append_mtp, as_speculators, write_eagle3

from quire.cluster.config import speculative_options
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.config.speculative_options import MAX_SPECULATIVE_TOKENS
from quire.proto.config import SpeculativeConfig
from quire.proto.errors import ConfigError


def vocab_size_of(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"method": "ngram"}, SpeculativeConfig("ngram", 5, 2, None)),
        ({"model": "ngram", "num_speculative_tokens": 3}, SpeculativeConfig("ngram", 3, 2, None)),
        ({"model": "[ngram]", "prompt_lookup_max": 4}, SpeculativeConfig("ngram", 5, 2, 4)),
        ({"method": "ngram", "prompt_lookup_max": 1}, SpeculativeConfig("ngram", 5, 1, 1)),
        ({"method": "ngram", "prompt_lookup_min": 3, "model": None}, SpeculativeConfig("ngram", 5, 3, None)),
        ({"method": "ngram_gpu", "model": "ngram"}, SpeculativeConfig("ngram", 5, 2, None)),
        ({"method": "suffix", "parallel_drafting": False}, SpeculativeConfig("ngram", 5, 2, None)),
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


def test_eagle3_head_reaches_the_replica(make_model: Any, tmp_path: Path) -> None:
    target = make_model("llama")
    head = write_eagle3(tmp_path / "head", vocab_size_of(target), num_layers=3)
    given: Any = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    speculative = resolve(EngineOptions(str(target), speculative_config=given), Machine(1, 0)).speculative
    assert speculative is not None
    assert (speculative.method, speculative.num_speculative_tokens) == ("eagle3", 3)
    assert speculative.draft is not None
    assert (speculative.draft.path, speculative.draft.num_layers) == (str(head), 1)
    assert speculative.draft.max_model_len == 512


@pytest.mark.parametrize("name", ["mtp", "deepseek_mtp"])
def test_mtp_head_of_the_model_itself_reaches_the_replica(make_model: Any, tmp_path: Path, name: str) -> None:
    target = add_mtp(make_model("llama"), tmp_path / "model", mimo=False)
    given: Any = {"method": name, "num_speculative_tokens": 1}
    speculative = resolve(EngineOptions(str(target), speculative_config=given), Machine(1, 0)).speculative
    assert speculative is not None
    assert speculative.method == "mtp"
    assert speculative.draft is not None
    assert (speculative.draft.path, speculative.draft.num_layers) == (str(target), 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is a LlamaForCausalLM, must be an EAGLE-3 head"),
        ({"vocab_size": 7}, "has 7 tokens in its vocabulary, must have the 3072 of demo"),
        ({"num_hidden_layers": 2}, "has 2 layers, must have 1"),
        ({"eagle_config": None}, r"layers \(2, 2, 1\), must be 3 different ones from 0 to 4"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}}, "must be 3 different ones"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "12"}}, "must be 3 different ones"),
    ],
)
def test_eagle3_head_that_does_not_fit_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    head = write_eagle3(tmp_path / "head", 3072, num_layers=4)
    config = json.loads((head / "config.json").read_text()) | settings
    (head / "config.json").write_text(json.dumps(config))
    given: Any = {"method": "eagle3", "model": str(head)}
    with pytest.raises(ConfigError, match=message):
        resolve(EngineOptions("demo", speculative_config=given), Machine(1, 0))


def test_mtp_for_a_model_without_heads_is_refused() -> None:
    given: Any = {"method": "mtp"}
    with pytest.raises(ConfigError, match="method is 'mtp', but demo has no heads for it"):
        resolve(EngineOptions("demo", speculative_config=given), Machine(1, 0))


def test_mtp_head_of_sparse_attention_caches_keys_of_its_indexer(make_model: Any, tmp_path: Path) -> None:
    target = append_mtp(make_model("deepseek_v32"), tmp_path / "model")
    given: Any = {"method": "deepseek_mtp", "model": str(target)}  # as vLLM's users name the model itself
    config = resolve(EngineOptions(str(target), speculative_config=given), Machine(1, 0))
    assert config.speculative is not None
    assert config.speculative.draft is not None
    assert config.speculative.draft.latent_dim == config.model.latent_dim


def test_mtp_head_of_another_model_is_refused(make_model: Any, tmp_path: Path) -> None:
    target = add_mtp(make_model("llama"), tmp_path / "model", mimo=False)
    given: Any = {"method": "mtp", "model": "demo"}
    with pytest.raises(ConfigError, match="model is 'demo', but method 'mtp' reads the head of model itself"):
        resolve(EngineOptions(str(target), speculative_config=given), Machine(1, 0))


def test_keys_of_vllm_without_a_meaning_are_named_in_one_warning(log_of: Callable[[str], list[str]]) -> None:
    warnings = log_of(speculative_options.__name__)
    given: Any = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "draft_tensor_parallel_size": 1,
        "disable_by_batch_size": 8,
        "revision": None,
    }
    config = resolve(EngineOptions("demo", speculative_config=given), Machine(1, 0))
    assert config.speculative == SpeculativeConfig("ngram", 3, 2, None)
    (warning,) = warnings
    assert "draft_tensor_parallel_size (a draft model is split over the ranks like the model)" in warning
    assert "disable_by_batch_size (measured times decide when drafts are off)" in warning


def test_revision_is_that_of_the_draft_model_on_the_hub(make_model: Any) -> None:
    target, draft = (str(make_model("llama", seed=seed)) for seed in (1, 2))
    given: Any = {"model": draft, "revision": "v2"}
    with pytest.raises(ConfigError, match=r"revision is 'v2', but .* is a directory"):
        resolve(EngineOptions(target, speculative_config=given), Machine(1, 0))


def test_head_of_the_library_speculators_reaches_the_replica(make_model: Any, tmp_path: Path) -> None:
    target = make_model("llama")
    head = write_eagle3(tmp_path / "other", vocab_size_of(target), num_layers=3, draft_vocab_size=90)
    given: Any = {"model": str(as_speculators(head, tmp_path / "speculator.eagle3"))}  # method: from the name
    speculative = resolve(EngineOptions(str(target), speculative_config=given), Machine(1, 0)).speculative
    assert speculative is not None
    assert speculative.method == "eagle3"
    assert speculative.draft is not None
    assert speculative.draft.hf["draft_vocab_size"] == 90
    assert speculative.draft.hf["norm_before_residual"]
    assert speculative.draft.max_model_len == 512


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculators_model_type": "peagle"}, "has speculators_model_type 'peagle', must have 'eagle3'"),
        ({"transformer_layer_config": {"model_type": "qwen3"}}, "model_type 'qwen3', must have 'llama'"),
        ({"norm_output": True}, "has norm_output True, must have False"),
    ],
)
def test_head_of_speculators_with_other_parts_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    head = as_speculators(write_eagle3(tmp_path / "other", 3072, num_layers=4), tmp_path / "head")
    config = json.loads((head / "config.json").read_text()) | settings
    (head / "config.json").write_text(json.dumps(config))
    given: Any = {"method": "eagle3", "model": str(head)}
    with pytest.raises(ConfigError, match=message):
        resolve(EngineOptions("demo", speculative_config=given), Machine(1, 0))


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_head_for_modules_of_transformers_is_refused(make_model: Any, method: str) -> None:
    given: Any = {"method": method, "model": "demo"}
    with pytest.raises(ConfigError, match="is for models that quire defines itself"):
        resolve(EngineOptions(str(make_model("gpt2")), speculative_config=given), Machine(1, 0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "speculative_config is '{', must be a JSON object"),
        ("[]", r"speculative_config is '\[\]', must be a JSON object"),
        (3, "speculative_config is 3, must be a JSON object"),
        (
            {"method": "medusa"},
            "speculative_config: method is 'medusa', must be ngram, draft_model, eagle3 or mtp",
        ),
        ({"method": "eagle3"}, "speculative_config: model is None, must name the model of method eagle3"),
        ({}, "speculative_config: model is None, must name the model of method draft_model"),
        ({"method": "draft_model", "model": 3}, "speculative_config: model is 3, must be text"),
        (
            {"method": "draft_model", "model": "demo", "parallel_drafting": True},
            "speculative_config: parallel_drafting is not supported",
        ),
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
