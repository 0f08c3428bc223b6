"""Options, a machine and a model directory become a configuration, or a one-line error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from state_kinds import STATE_KINDS

from quire.cluster.config.deployment import Deployment
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine, smallest_gpu_of_nodes
from quire.cluster.config.resolve import resolve, resolve_deployment
from quire.cluster.text.requests.tokenizer import Tokenizer
from quire.proto.config import EngineConfig
from quire.proto.errors import ConfigError, ModelLoadError
from quire.worker.graphs.graphs import GraphLimits

CPU = Machine(num_cores=2, num_gpus=0)


def resolve_on_cpu(model: Path | str, **options: Any) -> EngineConfig:
    return resolve(EngineOptions(str(model), **options), CPU)


@pytest.fixture
def model_copy(make_model: Callable[..., Path], tmp_path: Path) -> Path:
    """Return a copy of a model directory, for tests that damage it."""
    return Path(shutil.copytree(make_model("llama"), tmp_path / "model"))


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_bundled_model_resolves() -> None:
    config = resolve_on_cpu("demo")
    assert (config.model.name, config.model.architecture) == ("demo", "LlamaForCausalLM")
    assert (config.model.dtype, config.parallel.device) == ("float32", "cpu")
    assert config.model.num_heads % config.model.num_kv_heads == 0
    assert config.model.eos_token_ids
    assert config.cache.num_kv_blocks is None


def test_options_reach_the_configuration(make_model: Callable[..., Path]) -> None:
    model = make_model("qwen3")
    config = resolve_on_cpu(
        model,
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
    assert (config.cache.block_size, config.cache.num_kv_blocks, config.cache.kv_cache_memory) == (
        32,
        10,
        1 << 20,
    )
    limits = config.scheduler
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_queue_len) == (3, 7, 11)
    assert (limits.policy, limits.tenant_weights) == ("fair", (("gold", 3.0),))
    assert config.cache.num_host_kv_blocks == 12
    assert (config.model.seed, config.parallel.tensor_parallel_size) == (5, 2)
    assert resolve_on_cpu(model).model.name == model.name


@pytest.mark.parametrize(("ids", "expected"), [(3, (3, 0)), ([3, 4, 3], (3, 4, 0)), (None, (0,))])
def test_end_of_sequence_comes_from_generation_config_and_tokenizer(
    model_copy: Path, ids: Any, expected: tuple[int, ...]
) -> None:
    (model_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert resolve_on_cpu(model_copy).model.eos_token_ids == expected


def remove_weights(model: Path) -> None:
    for file in model.glob("*.safetensors"):
        file.unlink()


def make_gguf(model: Path) -> None:
    remove_weights(model)
    (model / "model-Q4_K_M.gguf").touch()


def remove_tokenizer(model: Path) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (shutil.rmtree, "not a directory"),
        (lambda model: (model / "config.json").unlink(), "no config.json"),
        (remove_weights, "no \\*.safetensors"),
        (make_gguf, "GGUF is not supported; take the model in safetensors"),
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
def test_broken_model_directory_raises_model_load_error(
    model_copy: Path, break_it: Callable[[Path], Any], message: str
) -> None:
    break_it(model_copy)
    with pytest.raises(ModelLoadError, match=message) as caught:
        resolve_on_cpu(model_copy)
    assert "\n" not in str(caught.value)


def test_code_of_a_model_directory_is_never_run(model_copy: Path) -> None:
    (model_copy / "custom.py").write_text("raise SystemExit('the code of the model was run')")
    edit(model_copy / "config.json", model_type="custom", auto_map={"AutoConfig": "custom.Config"})
    with pytest.raises(ModelLoadError):
        resolve_on_cpu(model_copy)


def test_directory_without_tokenizer_raises_model_load_error(model_copy: Path) -> None:
    remove_tokenizer(model_copy)
    with pytest.raises(ModelLoadError, match="tokenizer cannot be read") as caught:
        Tokenizer(str(model_copy))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8"}, "dtype is 'float8', must be auto, float32, bfloat16 or float16"),
        ({"device": "tpu"}, "device is 'tpu', must be auto, cpu or cuda"),
        ({"block_size": 0}, "block_size is 0, must be from 1 to 1024"),
        ({"block_size": 2048}, "block_size is 2048"),
        ({"max_model_len": 10_000}, "max_model_len is 10000, must be from 2 to 512, the model's context"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0, must be at least 1"),
        ({"num_kv_blocks": 1}, "num_kv_blocks is 1, must be at least 2"),
        ({"kv_cache_memory": 0}, "kv_cache_memory is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_queue_len": -1}, "max_queue_len is -1"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5, must be above 0 and at most 1"),
        ({"max_steps_in_flight": 0}, "max_steps_in_flight is 0, must be from 1 to 8"),
        ({"max_num_seqs": 0, "seed": 1, "block_size": 0}, "block_size is 0.*; max_num_seqs is 0"),
        ({"num_host_kv_blocks": -1}, "num_host_kv_blocks is -1, must be at least 0"),
        (
            {"policy": "lottery"},
            "must be fcfs, priority, shortest-prefill, fair or longest-prefix",
        ),
        (
            {"policy": "fcfs", "tenant_weights": [("gold", 2.0)]},
            "shares of the policy fair, but the policy is fcfs",
        ),
        ({"policy": "fair", "tenant_weights": [("gold", 0.0)]}, "has 0 for 'gold', must be above 0"),
        ({"policy": "fair", "tenant_weights": [("gold", float("nan"))]}, "has nan for 'gold'"),
        ({"policy": "fair", "tenant_weights": [("gold", 1.0)] * 2}, "has 'gold' 2 times, must have it once"),
    ],
)
def test_option_out_of_range_raises_config_error(
    make_model: Callable[..., Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_on_cpu(make_model("llama"), **options)


def test_resolve_refuses_ranks_that_do_not_divide_the_heads(make_model: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 3 does not divide.*8"):
        resolve_on_cpu(make_model("llama"), tensor_parallel_size=3)


def test_resolve_refuses_more_ranks_than_the_machine_carries(make_model: Callable[..., Path]) -> None:
    model = str(make_model("llama"))
    with pytest.raises(ConfigError, match="tensor_parallel_size is 8, but this machine has 1 CPU cores"):
        resolve(EngineOptions(model, tensor_parallel_size=8, device="cpu"), Machine(1, 0))
    with pytest.raises(ConfigError, match="tensor_parallel_size is 4, but this machine has 2 CUDA GPUs"):
        resolve(EngineOptions(model, tensor_parallel_size=4), Machine(1, 2))


def test_auto_picks_device_and_dtype_of_the_machine() -> None:
    on_gpu = resolve(EngineOptions("demo"), Machine(2, 1))
    assert (on_gpu.parallel.device, on_gpu.model.dtype) == ("cuda", "bfloat16")
    on_cpu = resolve(EngineOptions("demo"), CPU)
    assert (on_cpu.parallel.device, on_cpu.model.dtype) == ("cpu", "float32")


def test_deployment_resolves_for_the_nodes_of_its_ranks(make_model: Callable[..., Path]) -> None:
    model = str(make_model("llama"))
    deployment = Deployment.from_table(
        {"model": model, "tensor_parallel_size": 4, "rank_resources": {"CPU": 6}}
    )
    assert resolve_deployment(deployment, has_gpus=True).parallel.device == "cuda"
    parallel = resolve_deployment(deployment, has_gpus=False).parallel
    assert (parallel.device, parallel.threads_per_rank) == ("cpu", 6)


@pytest.mark.parametrize(
    ("gib", "num_seqs", "num_tokens"), [(0, 64, 2048), (39, 64, 2048), (44, 256, 8192), (79, 1024, 8192)]
)
def test_limits_of_a_step_follow_the_memory_of_the_gpu(gib: int, num_seqs: int, num_tokens: int) -> None:
    machine = Machine(2, 1, gib << 30)
    limits = resolve(EngineOptions("demo"), machine).scheduler
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (num_seqs, num_tokens)
    given = resolve(EngineOptions("demo", max_num_seqs=5, max_num_batched_tokens=9), machine).scheduler
    assert (given.max_num_seqs, given.max_num_batched_tokens) == (5, 9)
    on_cpu = resolve(EngineOptions("demo", device="cpu"), machine).scheduler
    assert (on_cpu.max_num_seqs, on_cpu.max_num_batched_tokens) == (64, 2048)


def test_deployment_resolves_for_the_smallest_gpu_of_the_nodes() -> None:
    h100 = {"GPU": 8.0, "accelerator_type:H100": 1.0}
    limits = {}
    for name, nodes in {
        "one kind": [h100],
        "two kinds": [h100, {"GPU": 1.0, "accelerator_type:L40S": 1.0}],
        "unknown": [h100, {"GPU": 1.0}],
        "either A100": [{"GPU": 8.0, "accelerator_type:A100": 1.0}],
        "none": [],
    }.items():
        config = resolve_deployment(Deployment(EngineOptions("demo")), True, smallest_gpu_of_nodes(nodes))
        limits[name] = config.scheduler.max_num_seqs
    assert limits == {"one kind": 1024, "two kinds": 256, "unknown": 64, "either A100": 64, "none": 64}


def test_resolve_refuses_standby_weights_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="standby_weights is for ranks on CPUs"):
        resolve(EngineOptions("demo", standby_weights=True), Machine(2, 1))
    assert resolve_on_cpu("demo", standby_weights=True).parallel.standby_weights


def test_resolve_refuses_a_transport_for_kv_that_stays() -> None:
    with pytest.raises(
        ConfigError, match="kv_transport is nixl, but KV stays in its replica; set kv_transfer or a role"
    ):
        resolve_on_cpu("demo", kv_transport="nixl")
    assert resolve_on_cpu("demo", kv_transport="nixl", kv_transfer=True).cache.kv_transport == "nixl"
    assert resolve_on_cpu("demo", kv_transport="nixl", role="prefill").cache.moves_kv


def test_resolve_refuses_flash_attention_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="attention_backend flash_attn is for GPUs"):
        resolve_on_cpu("demo", attention_backend="flash_attn")
    on_gpu = resolve(EngineOptions("demo", attention_backend="flash_attn"), Machine(2, 1))
    assert on_gpu.parallel.attention_backend == "flash_attn"


def test_resolve_refuses_fixed_scales_of_a_kv_cache_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype fp8_per_tensor is for GPUs; choose fp8_e4m3"):
        resolve_on_cpu("demo", kv_cache_dtype="fp8_per_tensor")
    on_gpu = resolve(EngineOptions("demo", kv_cache_dtype="fp8_per_tensor"), Machine(2, 1))
    assert on_gpu.cache.kv_cache_dtype == "fp8_per_tensor"


def test_resolve_refuses_flash_attention_that_must_be_batch_invariant() -> None:
    options = EngineOptions("demo", attention_backend="flash_attn", batch_invariant=True)
    with pytest.raises(
        ConfigError, match="flash_attn, whose bits depend on the batch; batch_invariant needs triton"
    ):
        resolve(options, Machine(2, 1))


def test_resolve_refuses_batch_invariant_sparse_attention_on_a_gpu(make_model: Callable[..., Path]) -> None:
    options = EngineOptions(str(make_model("deepseek_v32")), batch_invariant=True)
    with pytest.raises(ConfigError, match="batch_invariant does not support sparse attention"):
        resolve(options, Machine(2, 1))
    options = EngineOptions(str(make_model("deepseek_v3")), batch_invariant=True)
    limits = GraphLimits.of(resolve(options, Machine(2, 1)))
    assert not limits.mixed_shapes, "chunks in recorded steps are absorbed"
    assert GraphLimits.of(resolve(replace(options, batch_invariant=False), Machine(2, 1))).mixed_shapes


def test_whole_experts_are_for_mixtures_of_quires_own(make_model: Callable[..., Path]) -> None:
    config = resolve_on_cpu(make_model("mixtral"), enable_expert_parallel=True)
    assert config.parallel.enable_expert_parallel
    for kind, reason in (
        ("llama", "it has no experts"),
        ("flex_olmo", "does not support FlexOlmoForCausalLM"),
    ):
        with pytest.raises(ConfigError, match=f"enable_expert_parallel .*{reason}"):
            resolve_on_cpu(make_model(kind), enable_expert_parallel=True)


def test_dp_attention_is_for_latents_on_several_ranks(make_model: Callable[..., Path]) -> None:
    latents = make_model("deepseek_v3")
    config = resolve_on_cpu(latents, tensor_parallel_size=2, enable_dp_attention=True)
    assert config.parallel.num_kv_partitions == 2
    assert resolve_on_cpu(latents, tensor_parallel_size=2).parallel.num_kv_partitions == 1
    with pytest.raises(ConfigError, match="which LlamaForCausalLM does not have; leave it out"):
        resolve_on_cpu(make_model("llama"), tensor_parallel_size=2, enable_dp_attention=True)
    with pytest.raises(ConfigError, match="is for several ranks, tensor_parallel_size is 1"):
        resolve_on_cpu(latents, enable_dp_attention=True)


def test_groups_of_ranks_that_attend_together_divide_the_ranks(make_model: Callable[..., Path]) -> None:
    latents = make_model("deepseek_v3")
    options = {"tensor_parallel_size": 4, "enable_dp_attention": True}
    assert resolve_on_cpu(latents, **options, dp_attention_size=2).parallel.num_kv_partitions == 2
    with pytest.raises(ConfigError, match="is 3, must divide the 4 ranks of tensor_parallel_size: 2 or 4"):
        resolve_on_cpu(latents, **options, dp_attention_size=3)
    with pytest.raises(ConfigError, match="is 2, but enable_dp_attention is not set"):
        resolve_on_cpu(latents, tensor_parallel_size=4, dp_attention_size=2)


def test_dp_attention_refuses_drafts_without_latents(make_model: Callable[..., Path]) -> None:
    options = {"tensor_parallel_size": 2, "enable_dp_attention": True}
    folder = make_model("deepseek_v3")
    for model, is_refused in ((folder, False), (make_model("llama"), True)):
        drafts = json.dumps({"method": "draft_model", "model": str(model), "num_speculative_tokens": 2})
        with (
            pytest.raises(ConfigError, match="speculative_config does not have")
            if is_refused
            else nullcontext()
        ):
            config = resolve_on_cpu(folder, speculative_config=drafts, **options)
            assert config.speculative is not None


@pytest.mark.parametrize(
    ("settings", "policy"),
    [
        ({}, "fair"),
        ({"enable_lora": True}, "fair"),
        ({"enable_lora": True, "policy": "fcfs"}, "fcfs"),
        ({"enable_lora": True, "tenant_weights": (("gold", 3.0),)}, "fair"),
    ],
)
def test_tenants_and_adapters_share_the_rows_fairly_by_default(settings: dict[str, Any], policy: str) -> None:
    assert resolve_on_cpu("demo", **settings).scheduler.policy == policy


@pytest.mark.parametrize(
    ("model", "drafts"),
    [
        ("demo", {"method": "eagle3", "model": "demo-eagle3"}),
        ("demo", {"method": "draft_model", "model": "demo-draft"}),
        ("demo", {"method": "ngram"}),
        ("states", {"method": "ngram"}),
    ],
)
def test_stages_take_every_source_of_drafts(
    make_model: Callable[..., Path], model: str, drafts: dict[str, Any]
) -> None:
    name = str(make_model("lfm2", **STATE_KINDS["lfm2"])) if model == "states" else model
    options = {
        "pipeline_parallel_size": 2,
        "speculative_config": json.dumps(drafts | {"num_speculative_tokens": 2}),
    }
    speculative = resolve_on_cpu(name, **options).speculative
    assert speculative is not None
    assert speculative.method == drafts["method"]
