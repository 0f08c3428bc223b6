"""Checks before anything is imported or started: all problems at once, and none that `resolve` would not find."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.cluster.config import early_checks
from quire.cluster.config.early_checks import check_early
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.proto.errors import ConfigError, ModelLoadError

CPU = Machine(num_cores=2, num_gpus=0)


@pytest.fixture
def model_copy(make_model: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(make_model("llama"), tmp_path / "model"))


def edit(model: Path, **changes: Any) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def problems_of(model: Path, machine: Machine = CPU, **options: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        check_early(EngineOptions(str(model), **options), machine)
    return caught.value.problems or (str(caught.value),)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_good_model_passes(make_model: Callable[..., Path], architecture: str) -> None:
    check_early(EngineOptions(str(make_model(architecture))), CPU)


def test_problems_of_machine_options_and_files_are_named_together(model_copy: Path) -> None:
    edit(model_copy, num_attention_heads=4, num_key_value_heads=2, torch_dtype="int4", dtype="int4")
    weights = model_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    options: dict[str, Any] = {
        "tensor_parallel_size": 3,
        "tenant_weights": (("gold", 2.0),),
        "policy": "fcfs",
        "device": "cuda",
    }
    found = problems_of(model_copy, Machine(2, 1), **options)
    words = ("1 CUDA GPUs", "tenant weights", "truncated", "does not divide its attention heads", "'int4'")
    for problem, word in zip(found, words, strict=True):
        assert word in problem


def test_all_problems_of_adapter_options_are_named(model_copy: Path) -> None:
    found = problems_of(
        model_copy, lora_modules={"gold": "/gold"}, lora_target_modules="q_proj", max_loras=4, max_cpu_loras=2
    )
    assert [problem.split()[0] for problem in found] == [
        "lora_modules",
        "lora_target_modules",
        "max_cpu_loras",
    ]


def test_missing_directory_is_the_only_problem(tmp_path: Path) -> None:
    (found,) = problems_of(tmp_path / "nothing")
    assert "not a directory" in found


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"model_type": "imaginary"},
            "model_type is 'imaginary', which the installed transformers does not know",
        ),
        ({"architectures": ["ImaginaryForCausalLM"]}, "'ImaginaryForCausalLM' is not supported"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, must be from"),
    ],
)
def test_config_that_cannot_be_served_is_refused(
    model_copy: Path, changes: dict[str, Any], problem: str
) -> None:
    edit(model_copy, **changes)
    (found,) = problems_of(model_copy)
    assert problem in found


def test_context_is_not_judged_if_it_is_scaled(model_copy: Path) -> None:
    edit(model_copy, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    check_early(EngineOptions(str(model_copy), max_model_len=1000), CPU)
    edit(model_copy, rope_scaling=None, rope_parameters=None, max_position_embeddings=256)
    (found,) = problems_of(model_copy, max_model_len=1000)
    assert "from 2 to 256" in found


@pytest.mark.parametrize(
    "options", [{"kv_cache_memory": 1 << 20}, {"num_kv_blocks": 4}, {"num_host_kv_blocks": 4}]
)
def test_kv_cache_above_the_memory_is_refused(
    model_copy: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(early_checks, "available_bytes", lambda: None)
    check_early(EngineOptions(str(model_copy), **options), CPU)
    monkeypatch.setattr(early_checks, "available_bytes", lambda: 100)
    (found,) = problems_of(model_copy, **options)
    assert "the KV cache would take" in found
    # On a cluster the nodes' memory counts, which this machine cannot know.
    check_early(EngineOptions(str(model_copy), **options), CPU, with_weights=False)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "its header cannot be read"),
        (b"\x05\0\0\0\0\0\0\0[1,2]", "its header cannot be read"),
        (b"\x02\0\0\0\0\0\0\0{}", None),
        (b"\x03\0\0\0\0\0\0\0{}", "it is truncated"),
    ],
)
def test_header_of_weights_is_checked(model_copy: Path, content: bytes, problem: str | None) -> None:
    (model_copy / "model.safetensors").write_bytes(content)
    if problem is None:
        check_early(EngineOptions(str(model_copy)), CPU)
        return
    with pytest.raises(ModelLoadError, match=problem):
        check_early(EngineOptions(str(model_copy)), CPU)


def test_model_without_a_vocabulary_is_refused_unless_it_serves_token_ids(model_copy: Path) -> None:
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        (model_copy / name).unlink(missing_ok=True)
    (found,) = problems_of(model_copy)
    assert "no tokenizer" in found
    check_early(EngineOptions(str(model_copy), skip_tokenizer_init=True), CPU)


@pytest.mark.parametrize(
    ("options", "machine", "problem"),
    [
        ({"pipeline_parallel_size": 5}, CPU, "it has 3 layers; use pipeline_parallel_size 3 or less"),
        (
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 4, "device": "cuda"},
            Machine(2, 4),
            "has 4 CUDA",
        ),
    ],
)
def test_stages_that_cannot_be_are_refused(
    model_copy: Path, options: dict[str, Any], machine: Machine, problem: str
) -> None:
    assert any(problem in found for found in problems_of(model_copy, machine, **options))


EXPERTS = {"enable_expert_parallel": True, "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("options", "machine", "problem"),
    [
        ({"tensor_parallel_size": 2}, CPU, "is for whole experts; set enable_expert_parallel"),
        ({**EXPERTS, "tensor_parallel_size": 1}, CPU, "is for several ranks"),
        ({**EXPERTS, "all2all_backend": "deepep_low_latency"}, CPU, "deepep_low_latency is for GPUs"),
        (
            {**EXPERTS, "enable_lora": True, "all2all_backend": "deepep_low_latency", "device": "cuda"},
            Machine(2, 4),
            "does not support enable_lora; set it to all_to_all",
        ),
        ({**EXPERTS, "enable_lora": True, "enable_eplb": True}, CPU, "adapters do not move"),
        ({**EXPERTS, "enable_lora": True, "num_redundant_experts": 1}, CPU, "for one copy of each expert"),
        ({**EXPERTS, "fused_all_reduce": True, "device": "cuda"}, Machine(2, 4), "support fused_all_reduce"),
        (
            {**EXPERTS, "enable_eplb": True, "all2all_backend": "all_reduce"},
            CPU,
            "enable_eplb needs all2all_backend all_to_all, it is all_reduce",
        ),
        ({**EXPERTS, "enable_eplb": True, "standby_weights": True}, CPU, "does not support standby_weights"),
        (
            {**EXPERTS, "num_redundant_experts": 2, "all2all_backend": "all_reduce"},
            CPU,
            "num_redundant_experts is 2, but all2all_backend is all_reduce",
        ),
    ],
)
def test_tokens_that_cannot_travel_to_experts_are_refused(
    model_copy: Path, options: dict[str, Any], machine: Machine, problem: str
) -> None:
    options = {"all2all_backend": "all_to_all", **options}
    assert any(problem in found for found in problems_of(model_copy, machine, **options))
