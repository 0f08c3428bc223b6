"""TransformersSpec: an architecture that quire serves with transformers' modules, and checks that they can be used.

The checks read the configuration and the source of transformers' modules. No model code runs, and no code from the
model's directory is used.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..errors import ConfigError
from .attention import FULL, SLIDING

# Files of transformers.models.auto that name its configurations and its models.
_CONFIGURATIONS = ("configuration_auto.py", "auto_mappings.py")
_MODELS = ("modeling_auto.py",)

_importing = threading.Lock()

# Published model type |-> that of a configuration in transformers with the same fields.
MODEL_TYPE_ALIASES = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
# Architectures without the attention interface; `attention_adapters` replaces their attention modules.
ADAPTED = ("BloomForCausalLM", "FalconForCausalLM")
# Model types that are refused before anything of them is loaded |-> reason.
_REFUSED = {
    "inkling_text": "its attention has logits of relative positions, and short convolutions beside it",
    "inkling2_text": "its attention has logits of relative positions, and short convolutions beside it",
    "jetmoe": "its experts have keys and values of other shapes than its configuration",
    "hrm_text": "its layers are computed several times per token, each time with other keys and values",
    "diffllama": "its layers attend twice",
    "doge": "its attention has a mask of its own",
} | dict.fromkeys(
    (
        *("cohere_compass", "cohere_compass_text", "dots3_note"),
        *("emu3", "emu3_text_model", "fuyu", "gemma4_unified_assistant"),
        *("mllama", "mllama_text_model", "moshi", "phi4_multimodal"),
    ),
    "it reads images or sound of a kind that quire has no encoder for",
)
# Model types of decoders whose usual configurations have ``is_decoder`` false.
_DECODERS = ("gpt_neox", "gpt_neox_japanese")
# Styles of the tensor-parallel plan; every rank holds all other layers in full.
COLUMN, ROW = "colwise", "rowwise"
REPLICATED = ("replicate", "replicated_with_grad_allreduce")
# The embedding is sharded by its vocabulary whether or not a plan names it, as those since transformers 5.24 do.
_EMBEDDING = "embedding_rowwise"
_WITH_IMAGES = "ForConditionalGeneration"


@dataclass(frozen=True, slots=True)
class TransformersSpec:
    """A causal language model of transformers that can run on paged caches.

    Attributes:
        plan: pattern of a layer's name in the base model, with ``*`` for its number |-> COLUMN or ROW.
    """

    architecture: str
    plan: Mapping[str, str]


def check_architecture(name: str, architecture: str, hf: Mapping[str, Any]) -> None:
    """Check that transformers has the architecture and that it can run on paged caches.

    Args:
        name: the model's name, for errors.
        hf: its configuration.

    Raises:
        ConfigError: the architecture is not supported; states the reason.
    """
    if hf.get("is_encoder_decoder"):
        raise unsupported(name, architecture, "it is an encoder and a decoder, and only decoders are served")
    model_type = str(hf.get("model_type"))
    if architecture not in _causal_architectures(model_type):
        reason = f"transformers has no causal language model of that name for model type {model_type!r}"
        raise unsupported(name, architecture, reason)
    if model_type in _REFUSED:
        raise unsupported(name, architecture, _REFUSED[model_type])
    source = _modeling_source(_config_class(model_type))
    if _has_flag(source, "_is_stateful"):
        raise unsupported(
            name, architecture, "it keeps a recurrent state of a kind that quire has no layers for"
        )
    if architecture not in ADAPTED and not _has_flag(source, "_supports_attention_backend"):
        reason = "its attention does not go through transformers' attention interface"
        raise unsupported(name, architecture, reason)
    if hf.get("kv_lora_rank"):
        reason = "its keys and values are compressed (multi-head latent attention)"
        raise unsupported(name, architecture, reason)
    other_types = sorted(set(hf.get("layer_types") or []) - {FULL, SLIDING})
    if other_types:
        raise unsupported(name, architecture, f"it has layers of type {other_types[0]!r}")


@dataclass(frozen=True, slots=True)
class Listed:
    """A causal language model of the installed transformers.

    Attributes:
        has_plan: it can run on several ranks.
        refusal: why it is not served; empty if it is.
    """

    has_plan: bool
    refusal: str = ""


def list_architectures() -> dict[str, Listed]:
    """Return the decoders of the installed transformers, by `check_architecture` of their usual configurations.

    A model may still be refused for its own configuration, or when it is loaded, by `paged_selfcheck`.

    Returns:
        architecture |-> its entry, sorted.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: dict[str, Listed] = {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config_class = _config_class(model_type)
        plan = _plan_of(config_class)
        for architecture in _causal_architectures(model_type):
            try:
                fields = config_class().to_dict()
            except Exception:  # transformers raises errors of many kinds for configurations without defaults
                continue
            # Encoders have causal variants, too.
            is_decoder = fields.get("is_decoder") is not False or model_type in _DECODERS
            if architecture.endswith(_WITH_IMAGES) or not is_decoder:
                continue
            try:
                check_architecture(architecture, architecture, fields)
            except ConfigError as error:
                refusal = str(error).partition(" is not supported: ")[2]
                found.setdefault(architecture, Listed(False, refusal))
            else:
                found[architecture] = Listed(bool(plan) and not _other_styles(plan))
    return dict(sorted(found.items()))


def read_transformers_spec(model: ModelConfig, tensor_parallel_size: int) -> TransformersSpec:
    """Return the spec of the model.

    Raises:
        ConfigError: the model is not supported, or not on this number of ranks; states the reason.
    """
    check_architecture(model.name, model.architecture, model.hf)
    _check_rope(model)
    if model.num_kv_heads < 1:
        raise ConfigError(f"{model.name}: it has {model.num_kv_heads} KV heads, must have at least 1")
    plan = _plan_of(_config_class(str(model.hf["model_type"])))
    if tensor_parallel_size > 1:
        _check_plan(model, plan, tensor_parallel_size)
    return TransformersSpec(model.architecture, plan)


def layer_windows(model: ModelConfig) -> tuple[int, ...]:
    """Return ModelConfig.layer_windows of a model. Each layer that attends is checked against it."""
    kinds, window = model.hf.get("layer_types") or [], model.hf.get("sliding_window")
    if not isinstance(window, int) or not isinstance(kinds, list) or len(kinds) != model.num_layers:
        return ()
    windows = tuple(window if kind == SLIDING and window < model.max_model_len else 0 for kind in kinds)
    return windows if any(windows) else ()


def _check_rope(model: ModelConfig) -> None:
    """Check that rotations of one sequence do not depend on the longest one of the batch, as LongRoPE's do."""
    rope = model.hf.get("rope_parameters") or {}
    for settings in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        original_len = settings.get("original_max_position_embeddings") or 0
        if settings.get("rope_type") == "longrope" and model.max_model_len > original_len:
            reason = (
                f"its rope changes with the longest sequence; give a max_model_len of at most {original_len}"
            )
            raise unsupported(model.name, model.architecture, reason)


def _check_plan(model: ModelConfig, plan: Mapping[str, str], size: int) -> None:
    other_styles = _other_styles(plan)
    if not plan or other_styles:
        lack = f"needs {other_styles[0]!r} in its" if other_styles else "has no"
        raise ConfigError(
            f"{model.name}: architecture {model.architecture!r} {lack} tensor-parallel plan: tensor_parallel_size "
            f"must be 1, not {size}"
        )
    for what, count in (("attention heads", model.num_heads), ("KV heads", model.num_kv_heads)):
        if count % size:
            raise ConfigError(
                f"{model.name}: tensor_parallel_size {size} does not divide its {what}, {count}"
            )


def _plan_of(config_class: Any) -> dict[str, str]:
    """Return the tensor-parallel plan of the layers; empty if there is none."""
    plan = getattr(config_class, "base_model_tp_plan", None) or {}
    return {layer: style for layer, style in plan.items() if style != _EMBEDDING}


def _other_styles(plan: Mapping[str, str]) -> list[str]:
    """Return the styles of a tensor-parallel plan that are not supported."""
    return sorted(set(plan.values()) - {COLUMN, ROW, *REPLICATED})


def unsupported(name: str, architecture: str, reason: str) -> ConfigError:
    """Return the error for an architecture that cannot be served."""
    return ConfigError(f"{name}: architecture {architecture!r} is not supported: {reason}")


def _config_class(model_type: str) -> Any:
    # Slow to import, and needed only for these architectures.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def _causal_architectures(model_type: str) -> tuple[str, ...]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ())
    return (names,) if isinstance(names, str) else tuple(names)


def _modeling_source(config_class: type) -> str:
    """Return the source of the module that defines the models of a configuration."""
    package, _, module = config_class.__module__.rpartition(".")
    name = f"{package}.{module.replace('configuration_', 'modeling_', 1)}"
    found = importlib.util.find_spec(name)
    return Path(found.origin).read_text() if found is not None and found.origin is not None else ""


def _has_flag(source: str, flag: str) -> bool:
    """Return whether a class of the module sets the flag."""
    return re.search(rf"^    {flag} = True", source, re.MULTILINE) is not None


def has_model_type(model_type: str) -> bool:
    """Return False if transformers surely has no configuration of that model type."""
    return _names(_CONFIGURATIONS, MODEL_TYPE_ALIASES.get(model_type, model_type))


def has_architecture(architecture: str) -> bool:
    """Return False if transformers surely has no model of that name."""
    return _names(_MODELS, architecture)


def _names(files: tuple[str, ...], name: str) -> bool:
    source = _auto_source(files)
    return not source or f'"{name}"' in source


@functools.cache
def _auto_source(files: tuple[str, ...]) -> str:
    """Return the source of modules of transformers.models.auto, which take two seconds to import.

    Returns an empty text if transformers is not installed as files.
    """
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        return ""
    folder = Path(package.origin).parent / "models" / "auto"
    return "".join((folder / name).read_text() for name in files if (folder / name).is_file())


def import_transformers() -> Any:
    """Return the module transformers, which only one thread imports.

    The module replaces itself in sys.modules during its import: a thread that imports a name from it meanwhile finds
    that it has none.
    """
    with _importing:
        return importlib.import_module("transformers")
