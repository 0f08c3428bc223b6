"""What an operator asks for, and a model directory, become one EngineConfig. Nothing is started here."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...proto.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from ...proto.errors import ConfigError, ModelLoadError
from ...scheduler.core.policy import ADMISSION_KEYS
from ...worker.device import cuda_device_count
from ...worker.models.registry import check_supported
from .model_config import describe_model

DEMO_MODEL = "demo"
DEMO_MODEL_PATH = Path(__file__).parents[1] / "demo" / "model"

DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3", "int8")
POLICIES = (*ADMISSION_KEYS, "fair", "longest-prefix")
MAX_BLOCK_SIZE = 1024
# Ranks that share a core only wait for each other; a few are useful to try a layout on a small machine.
MAX_CPU_RANKS_PER_CORE = 4


@dataclass(frozen=True, slots=True)
class Machine:
    """What the ranks of a replica find: cores and CUDA GPUs."""

    num_cores: int
    num_gpus: int

    @staticmethod
    def this() -> Machine:
        return Machine(len(os.sched_getaffinity(0)), cuda_device_count())


def resolve(
    model: str,
    *,
    machine: Machine | None = None,
    served_model_name: str | None = None,
    tensor_parallel_size: int = 1,
    device: str = "auto",
    dtype: str = "auto",
    quantization: str | None = None,
    max_model_len: int | None = None,
    block_size: int = 16,
    kv_cache_memory: int | None = None,
    num_kv_blocks: int | None = None,
    num_host_kv_blocks: int = 0,
    kv_cache_dtype: str = "auto",
    gpu_memory_utilization: float = 0.9,
    prefix_caching: bool = True,
    batch_invariant: bool = False,
    fused_all_reduce: bool = False,
    cuda_graphs: bool = True,
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
        machine: that the ranks will run on; None: this one.
        served_model_name: what clients call it; None: the directory's name.
        device: ``cpu``, ``cuda``, or ``auto``: CUDA where there is a GPU.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto``: float32 on a CPU, the checkpoint's on a GPU.
        quantization: ``int8`` or ``fp8``: what full-precision weights become as they are read; None: what they are.
            Checkpoints that are quantised say so themselves.
        max_model_len: most tokens of prompt and answer together; None: the model's whole context.
        kv_cache_memory: KV bytes a rank may take; None: as CacheConfig says.
        num_kv_blocks: blocks of the pool, the scratch block included; None: as many as the memory holds.
        num_host_kv_blocks: blocks of host memory a rank, beside them, for what is preempted or evicted; 0: none.
        kv_cache_dtype: ``auto``, ``fp8_e4m3`` or ``int8``, as CacheConfig says.

    The other arguments are fields of CacheConfig, ParallelConfig and SchedulerConfig, under the same names.

    Raises:
        ModelLoadError: the directory is not a model that can be served.
        ConfigError: a value is out of its range, or this machine or model does not allow it.
    """
    path = DEMO_MODEL_PATH if model == DEMO_MODEL else Path(model).expanduser()
    _check_directory(path)
    if tensor_parallel_size < 1:
        raise ConfigError(f"tensor_parallel_size is {tensor_parallel_size}, must be at least 1")
    machine = machine or Machine.this()
    device = _resolve_device(device, machine)
    if fused_all_reduce and (device != "cuda" or tensor_parallel_size == 1):
        raise ConfigError("fused_all_reduce is for several ranks on GPUs")
    parallel = ParallelConfig(
        tensor_parallel_size,
        device,
        threads_per_rank=_threads_per_rank(tensor_parallel_size, device, machine),
        batch_invariant=batch_invariant,
        fused_all_reduce=fused_all_reduce,
        cuda_graphs=cuda_graphs,
    )
    described = describe_model(
        path, served_model_name or (model if model == DEMO_MODEL else path.resolve().name)
    )
    described = replace(
        described,
        dtype=_resolve_dtype(dtype, described.dtype, device),
        max_model_len=_resolve_max_model_len(max_model_len, described.max_model_len),
        seed=seed,
        quantization=quantization,
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
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ConfigError(f"kv_cache_dtype is {kv_cache_dtype!r}, must be auto, fp8_e4m3 or int8")
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
            kv_dtype=kv_cache_dtype,
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


def _resolve_device(device: str, machine: Machine) -> str:
    if device == "auto":
        return "cuda" if machine.num_gpus else "cpu"
    if device not in DEVICES:
        raise ConfigError(f"device is {device!r}, must be auto, {' or '.join(DEVICES)}")
    return device


def _threads_per_rank(tensor_parallel_size: int, device: str, machine: Machine) -> int:
    """A CPU rank's share of the cores. Raises ConfigError where the machine has too few cores or GPUs."""
    if device == "cuda":
        if tensor_parallel_size > (num_gpus := machine.num_gpus):
            raise ConfigError(
                f"tensor_parallel_size is {tensor_parallel_size}, but this machine has {num_gpus} CUDA GPUs"
            )
        return 1
    num_cores = machine.num_cores
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
