"""ModelConfig of a draft model or a draft head, checked against the target model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...proto.config import EngineConfig, ModelConfig
from ...proto.errors import ConfigError
from ...proto.model import eagle3_config
from ...proto.model.mtp_layouts import num_mtp_heads
from ...proto.model.registry import FAMILIES, check_heads, check_supported
from .engine_options import EngineOptions
from .model_config import describe_model
from .model_source import locate_model
from .speculative_options import SpeculativeOptions


def describe_draft(
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
    target, own = config.model, _engine_options(options)
    draft = describe_model(locate_model(own, with_weights=with_weights).path, own.name)
    _check_vocabulary(draft, target)
    if draft.max_model_len < target.max_model_len:
        raise ConfigError(
            f"speculative_config: model {own.name} has a context of {draft.max_model_len} tokens, must be at least "
            f"{target.max_model_len}; lower max_model_len, or choose another model"
        )
    parallel = config.parallel
    check_supported(draft, parallel.tensor_parallel_size, expert_parallel=parallel.enable_expert_parallel)
    return replace(draft, dtype=target.dtype, max_model_len=target.max_model_len)


def _describe_eagle3(config: EngineConfig, options: SpeculativeOptions, with_weights: bool) -> ModelConfig:
    target, own = config.model, _engine_options(options)
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


def _engine_options(options: SpeculativeOptions) -> EngineOptions:
    assert options.model is not None
    return EngineOptions(options.model, revision=options.revision)


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
            "(num_nextn_predict_layers in its config.json)"
        )
    return replace(config.model, num_layers=1)


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
