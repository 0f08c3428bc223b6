"""What an operator asks for, and a model directory, become one EngineConfig. Nothing is started here."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..proto.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from ..proto.errors import ConfigError, ModelLoadError
from ..scheduler.policy import ADMISSION_KEYS
from ..worker.device import cuda_device_count
from ..worker.models.registry import check_supported

DEMO_MODEL = "demo"
DEMO_MODEL_PATH = Path(__file__).parent / "demo" / "model"

DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
POLICIES = (*ADMISSION_KEYS, "fair", "longest-prefix")
MAX_BLOCK_SIZE = 1024
# Ranks that share a core only wait for each other; a few are useful to try a layout on a small machine.
MAX_CPU_RANKS_PER_CORE = 4


def resolve(
    model: str,
    *,
    served_model_name: str | None = None,
    tensor_parallel_size: int = 1,
    device: str = "auto",
    dtype: str = "auto",
    max_model_len: int | None = None,
    block_size: int = 16,
    kv_cache_memory: int | None = None,
    num_kv_blocks: int | None = None,
    num_host_kv_blocks: int = 0,
    gpu_memory_utilization: float = 0.9,
    prefix_caching: bool = True,
    batch_invariant: bool = False,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    max_queue_len: int = 4096,
    max_steps_in_flight: int = 2,
    policy: str = "fcfs",
    tenant_weights: Sequence[tuple[str, float]] = (),
    step_timeout_s: float = 60.0,
    audit: bool = False,
    seed: int = 0,
) -> EngineConfig:
    """The one configuration that every process of a replica is handed.

    Args:
        model: a Hugging Face model directory, or ``demo`` for the bundled model.
        served_model_name: what clients call it; None: the directory's name.
        device: ``cpu``, ``cuda``, or ``auto``: CUDA where there is a GPU.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto``: float32 on a CPU, the checkpoint's on a GPU.
        max_model_len: most tokens of prompt and answer together; None: the model's whole context.
        kv_cache_memory: KV bytes a rank may take; None: as CacheConfig says.
        num_kv_blocks: blocks of the pool, the scratch block included; None: as many as the memory holds.
        num_host_kv_blocks: blocks of host memory a rank, beside them, for what is preempted or evicted; 0: none.

    The other arguments are fields of CacheConfig, ParallelConfig and SchedulerConfig, under the same names.

    Raises:
        ModelLoadError: the directory is not a model that can be served.
        ConfigError: a value is out of its range, or this machine or model does not allow it.
    """
    path = DEMO_MODEL_PATH if model == DEMO_MODEL else Path(model).expanduser()
    _check_directory(path)
    if tensor_parallel_size < 1:
        raise ConfigError(f"tensor_parallel_size is {tensor_parallel_size}, must be at least 1")
    device = _resolve_device(device)
    parallel = ParallelConfig(
        tensor_parallel_size,
        device,
        threads_per_rank=_threads_per_rank(tensor_parallel_size, device),
        batch_invariant=batch_invariant,
    )
    described = _describe_model(
        path, served_model_name or (model if model == DEMO_MODEL else path.resolve().name)
    )
    described = replace(
        described,
        dtype=_resolve_dtype(dtype, described.dtype, device),
        max_model_len=_resolve_max_model_len(max_model_len, described.max_model_len),
        seed=seed,
    )
    check_supported(described, tensor_parallel_size)

    _require_range("block_size", block_size, 1, MAX_BLOCK_SIZE)
    _require_positive("kv_cache_memory", kv_cache_memory)
    _require_positive("max_num_seqs", max_num_seqs)
    _require_positive("max_num_batched_tokens", max_num_batched_tokens)
    _require_positive("max_queue_len", max_queue_len)
    _require_positive("step_timeout_s", step_timeout_s)
    if num_host_kv_blocks < 0:
        raise ConfigError(f"num_host_kv_blocks is {num_host_kv_blocks}, must be at least 0")
    _check_policy(policy, tenant_weights)
    if not 0 < gpu_memory_utilization <= 1:
        raise ConfigError(
            f"gpu_memory_utilization is {gpu_memory_utilization}, must be above 0 and at most 1"
        )
    config = EngineConfig(
        model=described,
        cache=CacheConfig(
            block_size=block_size,
            memory_bytes=kv_cache_memory,
            gpu_memory_utilization=gpu_memory_utilization,
            prefix_caching=prefix_caching,
            num_host_blocks=num_host_kv_blocks,
        ),
        parallel=parallel,
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_queue_len=max_queue_len,
            max_steps_in_flight=max_steps_in_flight,
            step_timeout_s=step_timeout_s,
            audit=audit,
            policy=policy,
            tenant_weights=tuple(tenant_weights),
        ),
    )
    return config if num_kv_blocks is None else config.with_num_blocks(num_kv_blocks)


def _resolve_device(device: str) -> str:
    if device == "auto":
        return "cuda" if cuda_device_count() else "cpu"
    if device not in DEVICES:
        raise ConfigError(f"device is {device!r}, must be auto, {' or '.join(DEVICES)}")
    return device


def _threads_per_rank(tensor_parallel_size: int, device: str) -> int:
    """A CPU rank's share of the cores. Raises ConfigError where the machine has too few cores or GPUs."""
    if device == "cuda":
        if tensor_parallel_size > (num_gpus := cuda_device_count()):
            raise ConfigError(
                f"tensor_parallel_size is {tensor_parallel_size}, but this machine has {num_gpus} CUDA GPUs"
            )
        return 1
    num_cores = len(os.sched_getaffinity(0))
    if tensor_parallel_size > MAX_CPU_RANKS_PER_CORE * num_cores:
        raise ConfigError(
            f"tensor_parallel_size is {tensor_parallel_size}, but this machine has {num_cores} CPU cores, "
            f"which carry {MAX_CPU_RANKS_PER_CORE * num_cores} ranks at most"
        )
    return max(1, num_cores // tensor_parallel_size)


def _check_directory(path: Path) -> None:
    """What can be seen without reading: the first thing to look at, since reading imports transformers."""
    if not path.is_dir():
        raise ModelLoadError(
            f"{path}: not a directory; MODEL is a Hugging Face model directory or {DEMO_MODEL!r}"
        )
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"{path}: no config.json")
    if not any(path.glob("*.safetensors")):
        raise ModelLoadError(f"{path}: no *.safetensors file")


def _describe_model(path: Path, name: str) -> ModelConfig:
    """The model as its directory has it: its own dtype and its whole context."""
    hf = _load_hf_config(path)
    num_heads = _positive_int(hf, "num_attention_heads", path)
    return ModelConfig(
        path=str(path.resolve()),
        name=name,
        architecture=_architecture(hf, path),
        hf=hf.to_dict(),
        dtype=str(getattr(hf, "dtype", None) or "float32").removeprefix("torch."),
        max_model_len=_positive_int(hf, "max_position_embeddings", path),
        vocab_size=_positive_int(hf, "vocab_size", path),
        num_layers=_positive_int(hf, "num_hidden_layers", path),
        num_heads=num_heads,
        num_kv_heads=getattr(hf, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(hf, "head_dim", None) or _positive_int(hf, "hidden_size", path) // num_heads,
        eos_token_ids=_eos_token_ids(hf, path),
    )


def _load_hf_config(path: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises whatever its parsers and validators do
        raise ModelLoadError(f"{path / 'config.json'}: {_first_line(error)}") from error


def _architecture(hf: Any, path: Path) -> str:
    architectures = getattr(hf, "architectures", None)
    if not architectures:
        raise ModelLoadError(f"{path / 'config.json'}: names no architectures")
    return str(architectures[0])


def _positive_int(hf: Any, key: str, path: Path) -> int:
    value = getattr(hf, key, None)
    if not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"{path / 'config.json'}: {key} is {value}, must be a positive number")
    return value


def _eos_token_ids(hf: Any, path: Path) -> tuple[int, ...]:
    """generation_config.json has the last word, as in transformers."""
    ids = getattr(hf, "eos_token_id", None)
    file = path / "generation_config.json"
    if file.is_file():
        try:
            ids = json.loads(file.read_text()).get("eos_token_id", ids)
        except (ValueError, AttributeError) as error:
            raise ModelLoadError(f"{file}: {_first_line(error)}") from error
    if ids is None:
        return ()
    ids = [ids] if isinstance(ids, int) else ids
    if not isinstance(ids, list) or not all(isinstance(token_id, int) for token_id in ids):
        raise ModelLoadError(f"{path}: eos_token_id is {ids!r}, must be a token id or a list of them")
    return tuple(dict.fromkeys(ids))


def _resolve_dtype(dtype: str, checkpoint_dtype: str, device: str) -> str:
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else checkpoint_dtype
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}, must be auto, {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    return dtype


def _resolve_max_model_len(max_model_len: int | None, context_len: int) -> int:
    if max_model_len is None:
        return context_len
    _require_range("max_model_len", max_model_len, 2, context_len, why=", the model's context")
    return max_model_len


def _check_policy(policy: str, tenant_weights: Sequence[tuple[str, float]]) -> None:
    if policy not in POLICIES:
        raise ConfigError(f"policy is {policy!r}, must be {', '.join(POLICIES[:-1])} or {POLICIES[-1]}")
    if tenant_weights and policy != "fair":
        raise ConfigError(f"tenant weights are shares of the policy fair, but the policy is {policy}")
    names = [tenant for tenant, _ in tenant_weights]
    for tenant, weight in tenant_weights:
        if names.count(tenant) > 1:
            raise ConfigError(f"tenant {tenant!r} has {names.count(tenant)} weights, must have one")
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(f"the weight of tenant {tenant!r} is {weight}, must be above 0")


def _require_range(name: str, value: int, low: int, high: int, why: str = "") -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}, must be from {low} to {high}{why}")


def _require_positive(name: str, value: float | None) -> None:
    if value is not None and value <= 0:
        raise ConfigError(f"{name} is {value}, must be above 0")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
