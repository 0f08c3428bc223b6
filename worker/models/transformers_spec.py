"""TransformersSpec: an architecture that quire has no definition of its own for, and whether transformers' will do.

Everything is read from the configuration and from the text of transformers' modules: no model code runs, and none
comes from the model's directory.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...proto.config import ModelConfig
from ...proto.errors import ConfigError
from .spec import FULL, SLIDING

# Their attention is written into their modules, where `attention_adapters` replaces it.
ADAPTED = ("BloomForCausalLM", "FalconForCausalLM")
# What a rank does with a layer of the plan; all other layers are held in full by every rank.
COLUMN, ROW = "colwise", "rowwise"
WHOLE = ("replicate", "replicated_with_grad_allreduce")


@dataclass(frozen=True, slots=True)
class TransformersSpec:
    """A causal language model of transformers that can run on paged caches.

    Attributes:
        plan: pattern of a layer's name within the base model, with ``*`` for its number |-> COLUMN or ROW.
    """

    architecture: str
    plan: Mapping[str, str]


def check_architecture(name: str, architecture: str, hf: Mapping[str, Any]) -> None:
    """Whether transformers has the architecture, and it is one that can run on paged caches.

    Args:
        name: of the model.
        hf: its configuration.

    Raises:
        ConfigError: no; says why.
    """
    if hf.get("is_encoder_decoder"):
        raise refusal(name, architecture, "it is an encoder and a decoder, and only decoders are served")
    model_type = str(hf.get("model_type"))
    if architecture not in _causal_architectures(model_type):
        why = f"transformers has no causal language model of that name for model type {model_type!r}"
        raise refusal(name, architecture, why)
    source = _modeling_source(_config_class(model_type))
    if _has_flag(source, "_is_stateful"):
        raise refusal(name, architecture, "it keeps a recurrent state, and only attention is cached")
    if architecture not in ADAPTED and not _has_flag(source, "_supports_attention_backend"):
        why = "its attention does not go through transformers' attention interface"
        raise refusal(name, architecture, why)
    if hf.get("kv_lora_rank"):
        why = "its keys and values are compressed (multi-head latent attention)"
        raise refusal(name, architecture, why)
    strange = sorted(set(hf.get("layer_types") or []) - {FULL, SLIDING})
    if strange:
        raise refusal(name, architecture, f"it has layers of type {strange[0]!r}")


def read_transformers_spec(model: ModelConfig, tensor_parallel_size: int) -> TransformersSpec:
    """How transformers would serve the model.

    Raises:
        ConfigError: it would not, or not on so many ranks; says why.
    """
    check_architecture(model.name, model.architecture, model.hf)
    if model.hf.get("quantization_config") or model.quantization is not None:
        why = "architectures that are served through transformers cannot be quantized"
        raise refusal(model.name, model.architecture, why)
    _check_rope(model)
    config_class = _config_class(str(model.hf["model_type"]))
    plan = dict(getattr(config_class, "base_model_tp_plan", None) or {})
    if tensor_parallel_size > 1:
        _check_plan(model, plan, tensor_parallel_size)
    return TransformersSpec(model.architecture, plan)


def _check_rope(model: ModelConfig) -> None:
    """Transformers changes some rotations with the longest sequence of a batch: a sequence would feel the others."""
    rope = model.hf.get("rope_parameters") or {}
    for settings in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        original_len = settings.get("original_max_position_embeddings") or 0
        if settings.get("rope_type") == "longrope" and model.max_model_len > original_len:
            why = (
                f"its rope changes with the longest sequence; give a max_model_len of at most {original_len}"
            )
            raise refusal(model.name, model.architecture, why)


def _check_plan(model: ModelConfig, plan: Mapping[str, str], size: int) -> None:
    strange = sorted(set(plan.values()) - {COLUMN, ROW, *WHOLE})
    if not plan or strange:
        lack = f"needs {strange[0]!r} in its" if strange else "has no"
        raise ConfigError(
            f"{model.name}: architecture {model.architecture!r} {lack} tensor-parallel plan: tensor_parallel_size "
            f"must be 1, not {size}"
        )
    for what, count in (("attention heads", model.num_heads), ("KV heads", model.num_kv_heads)):
        if count % size:
            raise ConfigError(
                f"{model.name}: tensor_parallel_size {size} does not divide its {what}, {count}"
            )


def refusal(name: str, architecture: str, why: str) -> ConfigError:
    """The error that says why a model of an architecture cannot be served."""
    return ConfigError(f"{name}: architecture {architecture!r} is not supported: {why}")


def _config_class(model_type: str) -> Any:
    # Slow to import, and needed by the architectures only that come here.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def _causal_architectures(model_type: str) -> tuple[str, ...]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ())
    return (names,) if isinstance(names, str) else tuple(names)


def _modeling_source(config_class: type) -> str:
    """The text of the module that defines the models of a configuration."""
    package, _, module = config_class.__module__.rpartition(".")
    name = f"{package}.{module.replace('configuration_', 'modeling_', 1)}"
    found = importlib.util.find_spec(name)
    return Path(found.origin).read_text() if found is not None and found.origin is not None else ""


def _has_flag(source: str, flag: str) -> bool:
    """Whether a class of the module sets the flag."""
    return re.search(rf"^    {flag} = True", source, re.MULTILINE) is not None
