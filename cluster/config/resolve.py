"""Resolution of an operator's options, a machine and a model directory to one EngineConfig. Starts nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from ...proto.config import (
    CacheConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from ...proto.errors import ConfigError
from ...proto.model import eagle3_config
from ...proto.model.cca import CcaSpec
from ...proto.model.compressed import SharedKvSpec
from ...proto.model.divide_layers import divide_layers
from ...proto.model.entries import HasEntries, check_block_size
from ...proto.model.experts import Experts
from ...proto.model.mla import MlaSpec
from ...proto.model.mtp_layouts import mtp_layout, num_mtp_heads
from ...proto.model.pooled import check_key_places
from ...proto.model.registry import (
    FAMILIES,
    check_batch_invariant,
    check_dp_attention,
    check_expert_parallel,
    check_heads,
    check_supported,
    hands_out_states,
    indexed_attention,
    layer_mixers,
    state_layers,
)
from ...proto.model.spec import DecoderSpec
from ...proto.model.state import state_bytes
from ...proto.model.transformers_spec import TransformersSpec
from ...proto.options.option import declared_options
from ...proto.options.sections import ALL_REDUCE, DTYPES, ChatOptions, ImageOptions, StructuredOutputsOptions
from ...proto.state_memory import DEFAULT_CPU_KV_BYTES, choose_num_slots
from .deployment import Deployment
from .early_checks import (
    check_early,
    resolve_device,
    resolve_dtype,
    resolve_max_model_len,
    resolve_policy,
    threads_per_rank,
)
from .engine_options import EngineOptions, ModelReference
from .machine import Machine, step_limits
from .model_config import describe_model
from .model_source import ModelSource, locate_model
from .speculative_options import SpeculativeOptions, read_speculative_options, warn_of_ignored

DEFAULT_STEPS_IN_FLIGHT = 2
# Running sequences and as many snapshots, where the number of KV blocks is given instead of the memory.
_SLOTS_PER_SEQUENCE = 2
# Host blocks, and slots for states, through which files are read and written, if the operator gives no number.
_FEWEST_STAGING_BLOCKS, _MOST_STAGING_BLOCKS = 64, 2048
_STAGING_STATES = 8

_log = logging.getLogger(__name__)

SectionT = TypeVar("SectionT")


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
    num_threads = threads_per_rank(options, device, machine)
    model = _resolve_model(options, locate_model(options, with_weights=with_weights), device)
    expert_parallel = options.enable_expert_parallel
    spec = check_supported(model, options.tensor_parallel_size, expert_parallel=expert_parallel)
    if expert_parallel:
        _check_exchange(options, model, spec, check_expert_parallel(model, spec))
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
    num_ranks = deployment.engine.num_ranks
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
    """Return the configuration of a model that is described already."""
    limits = step_limits(gpu_bytes)
    max_cpu_loras = options.max_cpu_loras or max(options.max_loras, len(options.lora_modules))
    config = EngineConfig(
        model,
        _section(CacheConfig, options),
        _section(
            ParallelConfig,
            options,
            device=device,
            batch_invariant=device == "cpu" if options.batch_invariant is None else options.batch_invariant,
            threads_per_rank=threads_per_rank,
            stage_sizes=_stage_sizes(options, model),
        ),
        _section(
            SchedulerConfig,
            options,
            max_num_seqs=options.max_num_seqs or limits.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens or limits.max_num_batched_tokens,
            # One step for each stage, and one that is planned meanwhile.
            max_steps_in_flight=options.max_steps_in_flight
            or DEFAULT_STEPS_IN_FLIGHT + options.pipeline_parallel_size - 1,
            policy=resolve_policy(options),
        ),
        _section(ChatOptions, options, chat_template=_read_template(options.chat_template)),
        _section(StructuredOutputsOptions, options),
        _speculative_config(options),
        _section(LoraConfig, options, max_cpu_loras=max_cpu_loras) if options.enable_lora else None,
        _section(ImageOptions, options),
    )
    config = _with_host_blocks(config)
    _check_role(config)
    _check_record_steps(config)
    _check_kinds_of_attention(config)
    if not model.has_states or options.num_state_slots is not None:
        return config
    num_slots = _choose_num_slots(config, gpu_bytes)
    return replace(config, cache=replace(config.cache, num_state_slots=num_slots))


def _check_role(config: EngineConfig) -> None:
    """Check that the KV of a replica with a role can travel. Raises ConfigError."""
    cache, parallel = config.cache, config.parallel
    obstacles = {
        "enable_dp_attention divides the sequences": parallel.enable_dp_attention,
        "pipeline_parallel_size divides the layers": parallel.pipeline_parallel_size > 1,
        "prefix_caching is off": not cache.prefix_caching,
    }
    for obstacle, is_there in obstacles.items():
        if cache.role != "both" and is_there:
            raise ConfigError(f"role is {cache.role}, must be both: {obstacle}, so that no KV can travel")


def _check_record_steps(config: EngineConfig) -> None:
    """Check that the work of each step is known from its plan. Raises ConfigError."""
    obstacles = {
        "speculative_config": config.speculative is not None,
        "pipeline_parallel_size": config.parallel.pipeline_parallel_size > 1,
    }
    for option, is_set in obstacles.items():
        if config.scheduler.record_steps is not None and is_set:
            raise ConfigError(f"record_steps does not support {option}; leave one of them out")


def _check_kinds_of_attention(config: EngineConfig) -> None:
    """Check the options of a model with attention of a kind that not all of them support.

    Raises:
        ConfigError: an option does not support the model.
    """
    model, mixers = config.model, layer_mixers(config.model)
    compresses = any(isinstance(mixer, SharedKvSpec | HasEntries) for mixer in mixers)
    convolves = any(isinstance(mixer, CcaSpec) for mixer in mixers)
    has_sinks = any(isinstance(mixer, MlaSpec) and mixer.has_sinks for mixer in mixers)
    # A token has one scale, but its keys of indexers are written by several layers.
    shares_places = any(isinstance(mixer, MlaSpec) and mixer.num_index_keys > 1 for mixer in mixers)
    check_key_places(model.name, mixers, config.cache.block_size)
    check_block_size(model.name, mixers, config.cache.block_size)
    obstacles = {
        "kv_cache_dtype": (compresses or has_sinks or shares_places or bool(indexed_attention(model)))
        and config.cache.kv_cache_dtype != "auto",
        "enable_lora": convolves and config.lora is not None,
    }
    for option, is_set in obstacles.items():
        if is_set:
            raise ConfigError(f"{model.name}: {option} does not support {model.architecture}; leave it out")


def _with_host_blocks(config: EngineConfig) -> EngineConfig:
    """Return the configuration with host memory if blocks are stored: what is read and written passes through it.

    Raises:
        ConfigError: the options do not go together.
    """
    cache = config.cache
    if cache.kv_disk is None and cache.kv_shared is None:
        return config
    names = " and ".join(name for name in ("kv_disk", "kv_shared") if getattr(cache, name) is not None)
    if config.parallel.enable_dp_attention:
        raise ConfigError(f"{names} cannot store the blocks of enable_dp_attention; leave one of them out")
    if not cache.prefix_caching:
        raise ConfigError(f"{names} needs prefix_caching, which is off")
    if config.model.has_states and not cache.num_host_state_slots:
        cache = replace(cache, num_host_state_slots=_STAGING_STATES)
    if cache.num_host_kv_blocks:
        return replace(config, cache=cache)
    # Half of them may be in reads and writes at once: the longest prefix shall be read whole.
    num_blocks = 2 * len(config.cache_layout.groups) * config.max_blocks_per_seq
    num_blocks = min(_MOST_STAGING_BLOCKS, max(_FEWEST_STAGING_BLOCKS, num_blocks))
    return replace(config, cache=replace(cache, num_host_kv_blocks=num_blocks))


def _stage_sizes(options: EngineOptions, model: ModelConfig) -> tuple[int, ...]:
    """Return the layers of each pipeline stage; empty with one stage.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    if options.pipeline_parallel_size == 1:
        return ()
    spec = check_supported(
        model, options.tensor_parallel_size, expert_parallel=options.enable_expert_parallel
    )
    if not isinstance(spec, DecoderSpec):
        raise ConfigError(
            f"{model.name}: pipeline_parallel_size does not support {model.architecture}, which is served with the "
            "modules of transformers; leave it out, or use tensor_parallel_size"
        )
    return divide_layers(model.name, spec, options.pipeline_parallel_size, model.vision)


def _check_exchange(
    options: EngineOptions, model: ModelConfig, spec: DecoderSpec | TransformersSpec, experts: Experts
) -> None:
    """Check that the tokens of a model can travel to its experts. Raises ConfigError."""
    backend, size, most = options.all2all_backend, options.tensor_parallel_size, options.num_redundant_experts
    if backend == ALL_REDUCE:
        return
    if isinstance(spec, DecoderSpec) and spec.variant is not None:
        raise ConfigError(
            f"{model.name}: all2all_backend {backend} does not support {model.architecture}; set it to {ALL_REDUCE}"
        )
    if options.enable_dp_attention and model.has_states:
        raise ConfigError(
            f"{model.name}: all2all_backend {backend} with enable_dp_attention does not support models whose layers "
            f"keep a state of each sequence; set it to {ALL_REDUCE}"
        )
    if most > experts.count * (size - 1):
        raise ConfigError(
            f"num_redundant_experts is {most}, must be at most {experts.count * (size - 1)}: {experts.count} experts "
            f"on {size} ranks, each of which has an expert once"
        )
    if backend.startswith("deepep") and model.dtype != "bfloat16":
        raise ConfigError(f"all2all_backend {backend} carries bfloat16, but dtype is {model.dtype}")


def _choose_num_slots(config: EngineConfig, gpu_bytes: int) -> int:
    """Return the state slots of a rank for the memory that is known before the ranks have measured theirs.

    Raises:
        ConfigError: the states do not fit.
    """
    model, cache, num_ranks = config.model, config.cache, config.parallel.tensor_parallel_size
    max_num_seqs = config.scheduler.max_num_seqs
    memory = cache.kv_cache_memory
    if memory is None and config.parallel.device == "cpu":
        memory = DEFAULT_CPU_KV_BYTES
    if memory is None and gpu_bytes:
        memory = max(0, int(gpu_bytes * cache.gpu_memory_utilization) - _weight_bytes(model) // num_ranks)
    if cache.num_kv_blocks is not None or memory is None:
        return 1 + _SLOTS_PER_SEQUENCE * max_num_seqs
    dtype_bytes = DTYPES.get(model.dtype, 2)
    token_bytes = dtype_bytes * sum(map(prod, model.kv_shapes(num_ranks)))
    return choose_num_slots(
        model.name,
        max_num_seqs,
        state_bytes(state_layers(model, num_ranks), dtype_bytes),
        token_bytes * model.max_model_len * max_num_seqs // config.parallel.num_kv_partitions,
        memory,
    )


def _weight_bytes(model: ModelConfig) -> int:
    """Return the size of a model's files; 0 if they are not on this machine."""
    return sum(path.stat().st_size for path in Path(model.path).glob("*.safetensors"))


def _section(section: type[SectionT], options: EngineOptions, **computed: Any) -> SectionT:
    """Return a section with the operator's choices, except for the values that are computed from them."""
    return section(**_choices(section, options) | computed)


def _choices(section: type, options: EngineOptions) -> dict[str, Any]:
    """Return the operator's values of a section's options; those that it declares again are to be computed."""
    return {name: getattr(options, name) for name in declared_options(section)}


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
    draft = _describe_draft(config, own, with_weights=with_weights)
    return replace(config, speculative=replace(config.speculative, draft=draft))


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
        **_choices(ModelConfig, options),
        vision=None if options.language_model_only else described.vision,
        dtype=resolve_dtype(options.dtype, described.dtype, device),
        max_model_len=resolve_max_model_len(options.max_model_len, described.max_model_len),
    )


def _describe_draft(
    config: EngineConfig, options: SpeculativeOptions, *, with_weights: bool
) -> ModelConfig | None:
    """Return the draft model or head of a configuration that has the target model. Returns None for ngram.

    Raises:
        ModelLoadError: the directory is not a model, or a download failed.
        ConfigError: the draft model or head is not supported, or does not fit the target model.
    """
    assert config.speculative is not None
    describe = _DESCRIBE.get(config.speculative.method)
    draft = None if describe is None else describe(config, options, with_weights)
    if draft is not None and config.parallel.enable_dp_attention and not draft.latent_dim:
        raise ConfigError(
            f"enable_dp_attention is for multi-head latent attention, which {draft.name} of speculative_config does "
            "not have; draft by another method, or leave one of the two out"
        )
    return draft


def _describe_model(config: EngineConfig, options: SpeculativeOptions, with_weights: bool) -> ModelConfig:
    target, own = config.model, _reference(options)
    draft = describe_model(locate_model(own, with_weights=with_weights).path, own.name)
    _check_vocabulary(draft, target)
    if draft.max_model_len < target.max_model_len:
        raise ConfigError(
            f"speculative_config: model {own.name} has a context of {draft.max_model_len} tokens, must be at least "
            f"{target.max_model_len}; lower max_model_len, or choose another model"
        )
    if draft.has_states:
        raise ConfigError(
            f"speculative_config: model {own.name} is a {draft.architecture}, whose layers keep a state of each "
            "sequence, which drafting ranks have no slots for; choose a model with attention alone, or method 'ngram'"
        )
    parallel = config.parallel
    check_supported(draft, parallel.tensor_parallel_size, expert_parallel=parallel.enable_expert_parallel)
    return replace(draft, dtype=target.dtype, max_model_len=target.max_model_len)


def _describe_eagle3(config: EngineConfig, options: SpeculativeOptions, with_weights: bool) -> ModelConfig:
    target, own = config.model, _reference(options)
    _check_target(config)
    path = locate_model(own, with_weights=with_weights).path
    head = describe_model(path, own.name, _check_eagle3)
    _check_vocabulary(head, target)
    if head.num_layers != 1:
        raise ConfigError(f"speculative_config: model {own.name} has {head.num_layers} layers, must have 1")
    eagle3_config.aux_layers(head, target.num_layers)
    check_heads(head.name, head.num_heads, head.num_kv_heads, config.parallel.tensor_parallel_size)
    # Heads are trained on short sequences, and used at any position.
    return replace(head, dtype=target.dtype, max_model_len=target.max_model_len)


def _reference(options: SpeculativeOptions) -> ModelReference:
    assert options.model is not None
    return ModelReference(options.model, revision=options.revision)


def _describe_mtp(config: EngineConfig, options: SpeculativeOptions, with_weights: bool) -> ModelConfig:
    _check_target(config)
    if options.model is not None and not _names(config.model, options.model):
        raise ConfigError(
            f"speculative_config: model is {options.model!r}, but method 'mtp' reads the head of {config.model.name} "
            "itself; leave model out"
        )
    if num_mtp_heads(config.model) < 1:
        raise ConfigError(
            f"speculative_config: method is 'mtp', but {config.model.name} has no heads for it "
            f"({mtp_layout(config.model).count_field} in its config.json)"
        )
    return replace(config.model, num_layers=1, kv_layers=(), has_states=False)


def _names(model: ModelConfig, given: str) -> bool:
    """Return whether a text names the served model."""
    return given in (model.name, model.hub_id) or str(Path(given).expanduser().resolve()) == model.path


def _check_target(config: EngineConfig) -> None:
    assert config.speculative is not None
    if config.model.architecture not in FAMILIES:
        raise ConfigError(
            f"speculative_config: method {config.speculative.method!r} is for models that quire defines itself, "
            f"{config.model.name} is served with the modules of transformers"
        )
    if not hands_out_states(config.model):
        raise ConfigError(
            f"speculative_config: method {config.speculative.method!r} does not support "
            f"{config.model.architecture}, whose residual has several streams or is scaled; use method ngram or "
            "draft_model"
        )


def _check_vocabulary(draft: ModelConfig, target: ModelConfig) -> None:
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"speculative_config: model {draft.name} has {draft.vocab_size} tokens in its vocabulary, must have the "
            f"{target.vocab_size} of {target.name}"
        )


def _check_eagle3(name: str, architecture: str, hf: object) -> None:
    if architecture not in eagle3_config.ARCHITECTURES:
        raise ConfigError(
            f"speculative_config: model {name} is a {architecture}, must be an EAGLE-3 head: "
            + " or ".join(eagle3_config.ARCHITECTURES)
        )


# method |-> description of its model
_DESCRIBE: dict[str, Callable[[EngineConfig, SpeculativeOptions, bool], ModelConfig]] = {
    "draft_model": _describe_model,
    "eagle3": _describe_eagle3,
    "mtp": _describe_mtp,
}
