"""Wishes and a model directory become a configuration, or one clear line that says why not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.cluster.config import resolve as resolving
from quire.cluster.config.resolve import resolve
from quire.cluster.requests.tokenizer import Tokenizer
from quire.proto.errors import ConfigError, ModelLoadError


@pytest.fixture
def model_copy(make_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A model directory to break."""
    return Path(shutil.copytree(make_model("llama"), tmp_path / "model"))


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_the_bundled_model() -> None:
    config = resolve("demo", device="cpu")
    assert (config.model.name, config.model.architecture) == ("demo", "LlamaForCausalLM")
    assert (config.model.dtype, config.parallel.device) == ("float32", "cpu")
    assert config.model.num_heads % config.model.num_kv_heads == 0
    assert config.model.eos_token_ids
    assert config.cache.num_blocks is None


def test_what_is_asked_for(make_model: Callable[..., Path]) -> None:
    model = make_model("qwen3")
    config = resolve(
        str(model),
        tensor_parallel_size=2,
        dtype="bfloat16",
        device="cpu",
        max_model_len=64,
        block_size=32,
        num_kv_blocks=10,
        kv_cache_memory=1 << 20,
        max_num_seqs=3,
        max_num_batched_tokens=7,
        max_queue_len=11,
        policy="fair",
        tenant_weights=(("gold", 3.0),),
        num_host_kv_blocks=12,
        seed=5,
        served_model_name="q",
    )
    assert (config.model.name, config.model.dtype, config.model.max_model_len) == ("q", "bfloat16", 64)
    assert (config.cache.block_size, config.cache.num_blocks, config.cache.memory_bytes) == (32, 10, 1 << 20)
    limits = config.scheduler
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_queue_len) == (3, 7, 11)
    assert (limits.policy, limits.tenant_weights) == ("fair", (("gold", 3.0),))
    assert config.cache.num_host_blocks == 12
    assert (config.model.seed, config.parallel.tensor_parallel_size) == (5, 2)
    assert resolve(str(model), device="cpu").model.name == model.name


@pytest.mark.parametrize(("ids", "expected"), [(3, (3,)), ([3, 4, 3], (3, 4)), (None, ())])
def test_end_of_sequence_comes_from_generation_config(
    model_copy: Path, ids: Any, expected: tuple[int, ...]
) -> None:
    (model_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert resolve(str(model_copy), device="cpu").model.eos_token_ids == expected


def test_end_of_sequence_from_config_alone(model_copy: Path) -> None:
    (model_copy / "generation_config.json").unlink(missing_ok=True)
    edit(model_copy / "config.json", eos_token_id=[1, 2])
    assert resolve(str(model_copy), device="cpu").model.eos_token_ids == (1, 2)


def remove_weights(model: Path) -> None:
    for file in model.glob("*.safetensors"):
        file.unlink()


def remove_tokenizer(model: Path) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (shutil.rmtree, "not a directory"),
        (lambda model: (model / "config.json").unlink(), "no config.json"),
        (remove_weights, "no \\*.safetensors"),
        (lambda model: (model / "config.json").write_text("{"), "config.json: "),
        (
            lambda model: edit(model / "config.json", model_type="from_the_future"),
            "config.json: .*from_the_future",
        ),
        (lambda model: edit(model / "config.json", architectures=None), "names no architectures"),
        (lambda model: (model / "generation_config.json").write_text("[]"), "generation_config.json: "),
        (lambda model: edit(model / "generation_config.json", eos_token_id="end"), "eos_token_id is 'end'"),
    ],
)
def test_broken_directories(model_copy: Path, break_it: Callable[[Path], Any], said: str) -> None:
    break_it(model_copy)
    with pytest.raises(ModelLoadError, match=said) as caught:
        resolve(str(model_copy), device="cpu")
    assert "\n" not in str(caught.value)


def test_an_architecture_that_is_not_served(model_copy: Path) -> None:
    edit(model_copy / "config.json", architectures=["MambaForCausalLM"])
    with pytest.raises(ConfigError, match=r"MambaForCausalLM.*not supported.*for model type 'llama'"):
        resolve(str(model_copy), device="cpu")


def test_code_of_a_model_is_never_run(model_copy: Path) -> None:
    (model_copy / "custom.py").write_text("raise SystemExit('the code of the model was run')")
    edit(model_copy / "config.json", model_type="custom", auto_map={"AutoConfig": "custom.Config"})
    with pytest.raises(ModelLoadError):
        resolve(str(model_copy), device="cpu")


def test_a_directory_without_tokenizer(model_copy: Path) -> None:
    remove_tokenizer(model_copy)
    with pytest.raises(ModelLoadError, match="tokenizer cannot be read") as caught:
        Tokenizer(str(model_copy))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "float8"}, "dtype is 'float8', must be auto, float32, bfloat16 or float16"),
        ({"device": "tpu"}, "device is 'tpu', must be auto, cpu or cuda"),
        ({"block_size": 0}, "block_size is 0, must be from 1 to 1024"),
        ({"block_size": 2048}, "block_size is 2048"),
        ({"max_model_len": 10_000}, "max_model_len is 10000, must be from 2 to 512, the model's context"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0, must be at least 1"),
        ({"num_kv_blocks": 1}, "at least 2 are needed"),
        ({"kv_cache_memory": 0}, "kv_cache_memory is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_queue_len": -1}, "max_queue_len is -1"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
        ({"num_host_kv_blocks": -1}, "num_host_kv_blocks is -1, must be at least 0"),
        (
            {"policy": "lottery"},
            "must be fcfs, priority, shortest-prefill, fair or longest-prefix",
        ),
        ({"tenant_weights": [("gold", 2.0)]}, "shares of the policy fair, but the policy is fcfs"),
        ({"policy": "fair", "tenant_weights": [("gold", 0.0)]}, "'gold' is 0.0, must be above 0"),
        ({"policy": "fair", "tenant_weights": [("gold", float("nan"))]}, "'gold' is nan"),
        ({"policy": "fair", "tenant_weights": [("gold", 1.0)] * 2}, "'gold' has 2 weights, must have one"),
    ],
)
def test_wishes_out_of_range(make_model: Callable[..., Path], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(str(make_model("llama")), **({"device": "cpu"} | options))


def test_ranks_must_divide_the_heads(make_model: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 3 does not divide.*8"):
        resolve(str(make_model("llama")), tensor_parallel_size=3, device="cpu")


def test_more_ranks_than_the_machine_carries(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(make_model("llama"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    with pytest.raises(ConfigError, match="tensor_parallel_size is 8, but this machine has 1 CPU cores"):
        resolve(model, tensor_parallel_size=8, device="cpu")
    monkeypatch.setattr(resolving, "cuda_device_count", lambda: 2)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 4, but this machine has 2 CUDA GPUs"):
        resolve(model, tensor_parallel_size=4, device="auto")


def test_what_auto_means(make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolving, "cuda_device_count", lambda: 1)
    on_gpu = resolve("demo")
    assert (on_gpu.parallel.device, on_gpu.model.dtype) == ("cuda", "bfloat16")
    monkeypatch.setattr(resolving, "cuda_device_count", lambda: 0)
    on_cpu = resolve("demo")
    assert (on_cpu.parallel.device, on_cpu.model.dtype) == ("cpu", "float32")
