"""Checks of an engine's options, its machine and its model's files that import neither torch nor transformers.

They take milliseconds and name all problems together. `resolve` runs them first; `quire serve` runs them before it
imports Ray. They read config.json as it is, without transformers' defaults, so they refuse only what is stated there
and leave the rest to `describe_model` and `check_supported`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...proto.cache_groups import MAX_GROUPS
from ...proto.errors import ConfigError, ModelLoadError, Problems
from ...proto.kv_layout import FP8_PER_TENSOR
from ...proto.model.registry import ARCHITECTURE_ALIASES, FAMILIES, check_heads, latent_dim
from ...proto.model.transformers_spec import has_architecture, has_model_type
from ...proto.options.sections import ALL_REDUCE, ALL_TO_ALL, DTYPES, NIXL
from ...proto.options.values import in_words
from ...worker import available_bytes
from .engine_options import EngineOptions
from .machine import Machine
from .model_checks import (
    check_model_files,
    check_tokenizer_files,
    check_weight_files,
    read_config_file,
)

# Ranks that share a core only wait for each other; a few are useful to try a layout on a small machine.
MAX_CPU_RANKS_PER_CORE = 4


def check_early(options: EngineOptions, machine: Machine, *, with_weights: bool = True) -> None:
    """Check what can be checked without loading anything. The files of a model of the hub are left out.

    Args:
        machine: runs the ranks.
        with_weights: the ranks run on this machine.

    Raises:
        ConfigError: names all problems that were found.
        ModelLoadError: the only problem is in the model's files.
    """
    problems = Problems()
    device = resolve_device(options.device, machine)
    with problems:
        threads_per_rank(options, device, machine)
    with problems:
        _check_combinations(options, device)
    if not options.hub_id:
        _check_directory(problems, options, device, with_weights)
    problems.raise_any()


def resolve_device(device: str, machine: Machine) -> str:
    """Return the device of the ranks: ``cpu`` or ``cuda``."""
    if device == "auto":
        return "cuda" if machine.num_gpus else "cpu"
    return device


def resolve_policy(options: EngineOptions) -> str:
    """Return the order of admission: by default one in which a flood of a tenant or adapter delays no other."""
    return options.policy or "fair"


def threads_per_rank(options: EngineOptions, device: str, machine: Machine) -> int:
    """Return a CPU rank's share of the cores. Raises ConfigError if the machine has too few cores or GPUs."""
    num_ranks, sizes = options.num_ranks, f"tensor_parallel_size is {options.tensor_parallel_size}"
    if options.pipeline_parallel_size > 1:
        sizes += f" in each of {options.pipeline_parallel_size} stages (pipeline_parallel_size)"
    if device == "cuda":
        if num_ranks > machine.num_gpus:
            fitting = _fitting_size(options, machine.num_gpus)
            raise ConfigError(f"{sizes}, but this machine has {machine.num_gpus} CUDA GPUs{fitting}")
        return 1
    max_ranks = MAX_CPU_RANKS_PER_CORE * machine.num_cores
    if num_ranks > max_ranks:
        raise ConfigError(
            f"{sizes}, but this machine has {machine.num_cores} CPU cores, which carry {max_ranks} ranks at "
            f"most{_fitting_size(options, max_ranks)}"
        )
    return max(1, machine.num_cores // num_ranks)


def _fitting_size(options: EngineOptions, max_ranks: int) -> str:
    """Return which size to lower, and to what, so that the ranks are so many at most; empty if none are possible."""
    num_stages = options.pipeline_parallel_size
    if max_ranks >= num_stages:
        return f"; use tensor_parallel_size {max_ranks // num_stages} or less"
    return f"; use pipeline_parallel_size {max_ranks} or less" if max_ranks else ""


def resolve_dtype(dtype: str, checkpoint_dtype: str, device: str) -> str:
    """Return the type of activations. Raises ConfigError if the checkpoint's is not supported."""
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else checkpoint_dtype
    if dtype not in DTYPES:
        raise ConfigError(
            f"the checkpoint's dtype is {dtype!r}, must be {in_words(tuple(DTYPES))}; set the option dtype to one of "
            "them"
        )
    return dtype


def resolve_max_model_len(max_model_len: int | None, context_len: int) -> int:
    """Return the longest sequence. Raises ConfigError if it exceeds the model's context."""
    if max_model_len is None:
        return context_len
    if max_model_len > context_len:
        raise ConfigError(
            f"max_model_len is {max_model_len}, must be from 2 to {context_len}, the model's context"
        )
    return max_model_len


def _check_combinations(options: EngineOptions, device: str) -> None:
    policy, is_single = resolve_policy(options), options.tensor_parallel_size == 1
    backends = {
        "attention_backend": options.attention_backend,
        "linear_backend": options.linear_backend,
        "moe_backend": options.moe_backend,
        "all_reduce_backend": options.all_reduce_backend,
        "linear_attention_backend": options.linear_attention_backend,
    }
    libraries = {name: value for name, value in backends.items() if value not in ("auto", "triton")}
    adapters, most = [name for name, _ in options.lora_modules], options.max_cpu_loras
    # problem |-> whether the options have it
    problems = {
        "fused_all_reduce is for several ranks on GPUs": options.fused_all_reduce
        and (device != "cuda" or is_single),
        f"kv_cache_dtype {FP8_PER_TENSOR} is for GPUs; choose fp8_e4m3": options.kv_cache_dtype
        == FP8_PER_TENSOR
        and device != "cuda",
        f"all_reduce_backend is {options.all_reduce_backend}, but fused_all_reduce is not set": (
            options.all_reduce_backend == "flashinfer" and not options.fused_all_reduce
        ),
        "standby_weights is for ranks on CPUs: a GPU's memory ends with its process": options.standby_weights
        and device != "cpu",
        "kv_transport is nixl, but KV stays in its replica; set kv_transfer or a role": options.kv_transport
        == NIXL
        and not options.kv_transfer
        and options.role == "both",
        "weights_from_peers is for ranks on CPUs: a GPU's memory cannot be mapped": options.weights_from_peers
        and device != "cpu",
        "enable_dp_attention is for several ranks, tensor_parallel_size is 1": options.enable_dp_attention
        and is_single,
        **_attention_group_problems(options),
        **_exchange_problems(options, device),
        **{f"{name} {value} is for GPUs": device != "cuda" for name, value in libraries.items()},
        **{
            f"{name} is {value}, whose bits depend on the batch; batch_invariant needs triton": (
                options.batch_invariant
            )
            for name, value in libraries.items()
        },
        f"tenant weights are shares of the policy fair, but the policy is {policy}": options.tenant_weights
        and policy != "fair",
        "lora_modules are given, but enable_lora is not": adapters and not options.enable_lora,
        "lora_target_modules are given, but enable_lora is not": options.lora_target_modules is not None
        and not options.enable_lora,
        f"lora_modules has {options.name!r}, which is the name of the model": options.name in adapters,
        f"max_cpu_loras is {most}, must be at least max_loras, {options.max_loras}": most is not None
        and most < options.max_loras,
    }
    if found := [problem for problem, has_it in problems.items() if has_it]:
        raise ConfigError.of(found)


def _attention_group_problems(options: EngineOptions) -> dict[str, bool]:
    """Return the problems of groups of ranks that attend together, and whether the options have them."""
    count, num_ranks = options.dp_attention_size, options.tensor_parallel_size
    if count is None:
        return {}
    allowed = [size for size in range(2, num_ranks + 1) if num_ranks % size == 0]
    return {
        f"dp_attention_size is {count}, but enable_dp_attention is not set": not options.enable_dp_attention,
        f"dp_attention_size is {count}, must divide the {num_ranks} ranks of tensor_parallel_size: "
        f"{in_words([str(size) for size in allowed])}": num_ranks > 1 and count not in allowed,
    }


def _exchange_problems(options: EngineOptions, device: str) -> dict[str, bool]:
    """Return the problems of tokens that travel to their experts, and whether the options have them."""
    backend, travels = options.all2all_backend, options.all2all_backend != ALL_REDUCE
    return {
        f"all2all_backend {backend} is for whole experts; set enable_expert_parallel": travels
        and not options.enable_expert_parallel,
        f"all2all_backend {backend} is for several ranks, tensor_parallel_size is 1": travels
        and options.tensor_parallel_size == 1,
        f"all2all_backend {backend} is for GPUs": backend.startswith("deepep") and device != "cuda",
        f"all2all_backend {backend} does not support enable_lora; set it to {ALL_TO_ALL}": options.enable_lora
        and backend.startswith("deepep"),
        "enable_lora and num_redundant_experts exclude each other: adapters are for one copy of each expert": (
            options.enable_lora and options.num_redundant_experts > 0
        ),
        "enable_lora and enable_eplb exclude each other: adapters do not move with their experts": (
            options.enable_lora and options.enable_eplb
        ),
        f"all2all_backend {backend} does not support fused_all_reduce; leave one of the two out": travels
        and options.fused_all_reduce,
        f"enable_eplb needs all2all_backend {ALL_TO_ALL}, it is {backend}": options.enable_eplb
        and backend != ALL_TO_ALL,
        "enable_eplb does not support standby_weights, which keep experts where they were loaded; leave one of the "
        "two out": options.enable_eplb and options.standby_weights,
        "enable_eplb does not support weights_from_peers, which may not change; leave one of the two out": (
            options.enable_eplb and options.weights_from_peers
        ),
        f"num_redundant_experts is {options.num_redundant_experts}, but all2all_backend is {backend}, which reads "
        "one copy of each expert": options.num_redundant_experts > 0 and not travels,
    }


def _check_directory(problems: Problems, options: EngineOptions, device: str, with_weights: bool) -> None:
    """Collect the problems of the model's directory, and those of options with its config.json."""
    folder = options.model_path
    num_known = len(problems)
    with problems:
        if options.revision is not None:
            raise ConfigError(f"revision is {options.revision!r}, but {options.model} is a directory")
    with problems:
        check_model_files(folder, with_weights)
    if len(problems) > num_known:
        return
    if not options.skip_tokenizer_init:
        with problems:
            check_tokenizer_files(folder)
    if with_weights:
        with problems:
            check_weight_files(folder)
    fields: dict[str, Any] = {}
    with problems:
        fields = read_config_file(folder / "config.json")
    with problems:
        _check_names(folder / "config.json", options.name, fields)
    with problems:
        _check_heads(options, fields)
    with problems:
        _check_stages(options, fields)
    dtype = "float32"
    with problems:
        dtype = resolve_dtype(options.dtype, _stored_dtype(fields), device)
    with problems:
        if (context_len := _plain_context_len(fields)) is not None:
            resolve_max_model_len(options.max_model_len, context_len)
    if with_weights and device == "cpu":
        with problems:
            _check_kv_memory(options, fields, DTYPES[dtype])


def _check_names(path: Path, name: str, fields: dict[str, Any]) -> None:
    """Check that transformers knows the model's type, and that somebody implements its architecture."""
    model_type = fields.get("model_type")
    if isinstance(model_type, str) and not has_model_type(model_type):
        raise ModelLoadError(
            f"{path}: model_type is {model_type!r:.100}, which the installed transformers does not know"
        )
    architecture = _architecture(fields)
    if architecture and architecture not in FAMILIES and not has_architecture(architecture):
        raise ConfigError(
            f"{name}: architecture {architecture!r} is not supported: the installed transformers has no model of "
            "that name; `quire models` lists those that are"
        )


def _architecture(fields: dict[str, Any]) -> str:
    """Return the architecture as FAMILIES has it; empty if config.json states none."""
    given = fields.get("architectures")
    stated = str(given[0])[:100] if isinstance(given, list) and given else ""
    return ARCHITECTURE_ALIASES.get(stated, stated)


def _check_heads(options: EngineOptions, fields: dict[str, Any]) -> None:
    """Check that the ranks can share the heads, if config.json states their numbers."""
    architecture = _architecture(fields)
    num_heads, num_kv_heads = _whole(fields, "num_attention_heads"), _whole(fields, "num_key_value_heads")
    if architecture in FAMILIES and num_heads is not None and num_kv_heads is not None:
        check_heads(options.name, num_heads, num_kv_heads, options.tensor_parallel_size)


def _check_stages(options: EngineOptions, fields: dict[str, Any]) -> None:
    """Check that each stage gets a layer, if config.json states their number."""
    num_stages, num_layers = options.pipeline_parallel_size, _whole(fields, "num_hidden_layers")
    if num_layers is not None and num_stages > num_layers:
        raise ConfigError(
            f"{options.name}: pipeline_parallel_size is {num_stages}, but it has {num_layers} layers; use "
            f"pipeline_parallel_size {num_layers} or less"
        )


def _stored_dtype(fields: dict[str, Any]) -> str:
    stored = fields.get("dtype") or fields.get("torch_dtype")
    return stored.removeprefix("torch.") if isinstance(stored, str) else "float32"


def _plain_context_len(fields: dict[str, Any]) -> int | None:
    """Return the context length, unless config.json scales it or leaves it out."""
    ropes = (fields.get("rope_scaling") or {}, fields.get("rope_parameters") or {})
    if any(
        rope not in ({}, None) and (not isinstance(rope, dict) or "factor" in str(rope)) for rope in ropes
    ):
        return None
    return _whole(fields, "max_position_embeddings")


def _check_kv_memory(options: EngineOptions, fields: dict[str, Any], dtype_bytes: int) -> None:
    """Check the KV memory of all ranks together, which share the memory of this host."""
    block_bytes = _block_bytes(options, fields, dtype_bytes)
    per_rank = options.kv_cache_memory or 0
    if options.num_kv_blocks is not None:
        per_rank = block_bytes * options.num_kv_blocks
    per_rank += block_bytes * options.num_host_kv_blocks
    available = available_bytes()
    if available is not None and per_rank * options.num_ranks > available:
        ranks = f" for each of {options.num_ranks} ranks" if options.num_ranks > 1 else ""
        raise ConfigError(
            f"the KV cache would take {per_rank / 2**30:,.1f} GiB{ranks}, but this host has "
            f"{available / 2**30:,.1f} GiB left; lower kv_cache_memory, num_kv_blocks or num_host_kv_blocks"
        )


def _block_bytes(options: EngineOptions, fields: dict[str, Any], dtype_bytes: int) -> int:
    """Return a lower bound of the bytes of one KV block on one rank; 0 if config.json does not state its sizes."""
    num_layers, num_heads = _whole(fields, "num_hidden_layers"), _whole(fields, "num_attention_heads")
    hidden_size = _whole(fields, "hidden_size")
    if num_layers is None or num_heads is None or hidden_size is None:
        return 0
    num_layers -= min(_whole(fields, "num_kv_shared_layers") or 0, num_layers - 1)
    family = FAMILIES.get(_architecture(fields))
    if family is not None and family.change_layers is not None:
        num_layers = 1  # others may keep a state instead
    num_layers //= options.pipeline_parallel_size
    value_bytes = dtype_bytes if options.kv_cache_dtype == "auto" else 1
    if dim := latent_dim(_architecture(fields), fields):
        return num_layers * options.block_size * dim * value_bytes
    if _whole(fields, "sliding_window") or _whole(fields, "attention_chunk_size"):
        num_layers = -(-num_layers // MAX_GROUPS)  # of a cache group
    head_dim = _whole(fields, "head_dim") or hidden_size // num_heads
    num_kv_heads = -(-(_whole(fields, "num_key_value_heads") or 1) // options.tensor_parallel_size)
    return 2 * num_layers * options.block_size * num_kv_heads * head_dim * value_bytes


def _whole(fields: dict[str, Any], name: str) -> int | None:
    """Return a number that config.json states, if it is a positive whole one."""
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
