"""Resolution of an operator's options, a machine and a model directory to one EngineConfig. Starts nothing."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ...proto.config import (
    CacheConfig,
    ChatConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
)
from ...proto.errors import ConfigError
from ...proto.lora import LoraReference
from ...proto.model.registry import (
    check_batch_invariant,
    check_dp_attention,
    check_expert_parallel,
    check_supported,
)
from .deployment import Deployment
from .draft_models import describe_draft
from .early_checks import (
    check_early,
    resolve_device,
    resolve_dtype,
    resolve_max_model_len,
    resolve_policy,
    threads_per_rank,
)
from .engine_options import EngineOptions
from .machine import Machine
from .model_config import describe_model
from .model_source import ModelSource, locate_model
from .speculative_options import read_speculative_options, warn_of_ignored
from .step_limits import step_limits

DEFAULT_STEPS_IN_FLIGHT = 2


def resolve(options: EngineOptions, machine: Machine, *, with_weights: bool = True) -> EngineConfig:
    """Return the configuration that every process of a replica is handed.

    Args:
        machine: runs the ranks.
        with_weights: the ranks run on this machine, so a model of the hub is downloaded with its weights.

    Raises:
        ModelLoadError: the directory is not a model that can be served, or a download failed.
        ConfigError: the machine or the model does not allow an option, or two options exclude each other.
    """
    check_early(options, machine, with_weights=with_weights)
    device = resolve_device(options.device, machine)
    num_threads = threads_per_rank(options.tensor_parallel_size, device, machine)
    model = _resolve_model(options, locate_model(options, with_weights=with_weights), device)
    expert_parallel = options.enable_expert_parallel
    spec = check_supported(model, options.tensor_parallel_size, expert_parallel=expert_parallel)
    if expert_parallel:
        check_expert_parallel(model, spec)
    if options.enable_dp_attention:
        check_dp_attention(model)
    if options.batch_invariant and device == "cuda":
        check_batch_invariant(model)
    gpu_bytes = machine.gpu_bytes if device == "cuda" else 0
    config = engine_config(options, model, device=device, threads_per_rank=num_threads, gpu_bytes=gpu_bytes)
    return _with_draft_model(config, options, with_weights=with_weights)


def resolve_deployment(deployment: Deployment, has_gpus: bool, gpu_bytes: int = 0) -> EngineConfig:
    """Return the configuration of a deployment's replicas, whichever nodes they will run on.

    Args:
        has_gpus: the cluster has nodes with GPUs, or can add some.
        gpu_bytes: memory of the smallest of these GPUs; 0 if it is not known.

    Raises:
        ConfigError: the model does not allow an option.
    """
    num_ranks = deployment.engine.tensor_parallel_size
    num_cores = max(1, round(dict(deployment.rank_resources).get("CPU", 1.0)))
    machine = Machine(num_cores * num_ranks, num_ranks if has_gpus else 0, gpu_bytes)
    return resolve(deployment.engine, machine, with_weights=False)


def engine_config(
    options: EngineOptions,
    model: ModelConfig,
    *,
    device: str = "cpu",
    threads_per_rank: int = 1,
    gpu_bytes: int = 0,
) -> EngineConfig:
    """Return the configuration of a model that is described already.

    An option reaches the field of the same name; those with another name or a default of the device are listed here.
    """
    cache = CacheConfig(
        memory_bytes=options.kv_cache_memory,
        num_blocks=options.num_kv_blocks,
        num_host_blocks=options.num_host_kv_blocks,
        kv_dtype=options.kv_cache_dtype,
        **_same_named(CacheConfig, options),
    )
    parallel = ParallelConfig(
        device=device,
        threads_per_rank=threads_per_rank,
        **_same_named(ParallelConfig, options, "device"),
    )
    limits = step_limits(gpu_bytes)
    scheduler = SchedulerConfig(
        max_num_seqs=options.max_num_seqs or limits.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens or limits.max_num_batched_tokens,
        max_steps_in_flight=options.max_steps_in_flight or DEFAULT_STEPS_IN_FLIGHT,
        policy=resolve_policy(options),
        **_same_named(
            SchedulerConfig,
            options,
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_steps_in_flight",
            "policy",
        ),
    )
    chat = ChatConfig(
        chat_template=_read_template(options.chat_template),
        **_same_named(ChatConfig, options, "chat_template"),
    )
    structured_outputs = StructuredOutputsConfig(**_same_named(StructuredOutputsConfig, options))
    speculative = _speculative_config(options)
    lora = _lora_config(options)
    return EngineConfig(model, cache, parallel, scheduler, chat, structured_outputs, speculative, lora)


def _speculative_config(options: EngineOptions) -> SpeculativeConfig | None:
    """Return the configuration of speculative decoding, without the draft model."""
    if options.speculative_config is None:
        return None
    own = read_speculative_options(options.speculative_config)
    warn_of_ignored(own)
    return SpeculativeConfig(
        own.method, own.num_speculative_tokens, own.prompt_lookup_min, own.prompt_lookup_max
    )


def _with_draft_model(config: EngineConfig, options: EngineOptions, *, with_weights: bool) -> EngineConfig:
    """Return the configuration with the draft model or head that the options name, if they do.

    Raises:
        ModelLoadError, ConfigError: as `resolve` does; also if it does not fit the model.
    """
    if config.speculative is None or options.speculative_config is None:
        return config
    own = read_speculative_options(options.speculative_config)
    draft = describe_draft(config, own, with_weights=with_weights)
    return replace(config, speculative=replace(config.speculative, draft=draft))


def _same_named(config: type, options: EngineOptions, *leave_out: str) -> dict[str, Any]:
    names = {field.name for field in fields(config)} & {field.name for field in fields(options)}
    return {name: getattr(options, name) for name in names.difference(leave_out)}


def _read_template(given: str | None) -> str | None:
    """Return the text of a chat template that is given as a file or as the template itself."""
    if given is None or "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"chat template {given} cannot be read: {reason}") from error


def _resolve_model(options: EngineOptions, source: ModelSource, device: str) -> ModelConfig:
    described = describe_model(source.path, options.name, runner=options.runner)
    return replace(
        described,
        hub_id=source.hub_id,
        commit=source.commit,
        dtype=resolve_dtype(options.dtype, described.dtype, device),
        max_model_len=resolve_max_model_len(options.max_model_len, described.max_model_len),
        seed=options.seed,
        quantization=options.quantization,
    )


def _lora_config(options: EngineOptions) -> LoraConfig | None:
    """Return the configuration of adapters; None without adapters."""
    if not options.enable_lora:
        return None
    modules = tuple(LoraReference(name, path) for name, path in options.lora_modules)
    max_cpu_loras = options.max_cpu_loras or max(options.max_loras, len(modules))
    targets = tuple(options.lora_target_modules.split(",")) if options.lora_target_modules else ()
    return LoraConfig(options.max_loras, options.max_lora_rank, max_cpu_loras, modules, targets)
