"""ModelConfig from a model directory, before an operator's options apply."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ...proto.config import ModelConfig
from ...proto.errors import ConfigError, InvalidRequest, ModelLoadError, first_line, in_one_line
from ...proto.model.eagle3_config import read_speculators
from ...proto.model.registry import (
    ARCHITECTURE_ALIASES,
    FAMILIES,
    SEE_WHOLE_PROMPTS,
    TEXT_FIELDS,
    TEXT_MODELS,
    WITHOUT_ATTENTION,
    check_architecture,
    kv_layers,
    latent_dim,
    layer_windows,
    state_layers,
)
from ...proto.model.transformers_spec import MODEL_TYPE_ALIASES, import_transformers
from ...proto.model.vision import VISION_READERS, read_vision
from ...proto.options.values import in_words
from ...proto.sampling import SamplingDefaults, check_sampling_settings
from .model_checks import read_config_file, read_json_object
from .pooling_config import read_task

# Models with linear position biases (ALiBi) have no longest sequence. Those without a field for it were trained on
# this length.
_DEFAULT_CONTEXT_LEN = 2048
_MAX_NAME_CHARS = 100  # in errors; no architecture has so long a name
# Of a token's id, which some models have beyond the vocabulary or as -1 for none.
_MAX_ID = (1 << 31) - 1
_MAX_DIGITS = len(str(_MAX_ID))
FILE_NAME = "generation_config.json"
# Of any setting, as far from 0: the others have smaller limits.
_MAX_VALUE = (1 << 31) - 1


def describe_model(
    path: Path,
    name: str,
    check: Callable[[str, str, dict[str, Any]], None] = check_architecture,
    runner: str = "auto",
) -> ModelConfig:
    """Return the model of a directory, in the checkpoint's dtype and with its full context length.

    Args:
        name: the name to serve the model under.
        check: raises ConfigError if an architecture is not supported, given name, architecture and configuration.
        runner: the same as in EngineOptions.

    Raises:
        ModelLoadError: a file of the directory cannot be read, or has a bad value.
        ConfigError: the architecture is not supported.
    """
    stored = read_config_file(path / "config.json")
    try:
        return _describe(path, name, check, runner, stored)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelLoadError(f"{path / 'config.json'}: cannot be read: {in_one_line(error)}") from error


def _describe(
    path: Path,
    name: str,
    check: Callable[[str, str, dict[str, Any]], None],
    runner: str,
    stored: dict[str, Any],
) -> ModelConfig:
    """Return the model as `describe_model` does; values may have any type.

    Args:
        stored: content of config.json.
    """
    hf = _load_hf_config(path, stored, read_speculators(stored, name))
    recommended = read_generation_config(path)
    _add_modelopt(hf, path)
    whole, stated = hf.to_dict(), _architecture(hf, path)
    hf, architecture = _text_model(hf, stated, name)
    fields = hf.to_dict() | TEXT_FIELDS.get(hf.model_type, {})
    if (
        stated in VISION_READERS and "tie_word_embeddings" in stored
    ):  # the text model has a default of its own
        fields["tie_word_embeddings"] = bool(stored["tie_word_embeddings"])
    task = read_task(path, fields, architecture, runner)
    architecture = task.architecture
    check(name, architecture, fields)
    if task.pooling is not None and architecture not in FAMILIES:
        raise ConfigError(
            f"{name}: prompts of {architecture} cannot be pooled: it is served with transformers' modules"
        )
    context_len = _context_len(hf, path, has_own_decoder=architecture in FAMILIES)
    has_heads = architecture not in WITHOUT_ATTENTION
    num_heads = 1
    if has_heads:
        num_heads = _check_positive(_size(hf, fields, "num_attention_heads"), "num_attention_heads", path)
    vocab_size = _positive_int(hf, "vocab_size", path)
    model = ModelConfig(
        path=str(path.resolve()),
        name=name,
        architecture=architecture,
        hf=fields,
        dtype=str(getattr(hf, "dtype", None) or "float32").removeprefix("torch."),
        max_model_len=min(context_len, task.max_len or context_len),
        vocab_size=vocab_size,
        num_layers=_positive_int(hf, "num_hidden_layers", path),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(hf, fields, num_heads) if has_heads else 1,
        head_dim=_head_dim(hf, fields, num_heads, path) if has_heads else 1,
        eos_token_ids=end_token_ids(recommended, getattr(hf, "eos_token_id", None), path, vocab_size),
        sampling_defaults=sampling_defaults(recommended, path),
        generates=task.generates,
        pooling=task.pooling,
        latent_dim=latent_dim(architecture, fields),
        # A checkpoint of the text model alone has the architecture, and no settings of an encoder.
        vision=read_vision(name, stated, whole) if "vision_config" in stored and not task.pooling else None,
        sees_whole_prompt=stated in SEE_WHOLE_PROMPTS,
    )
    model = replace(model, kv_layers=kv_layers(model))
    # A prompt whose tokens attend to all of it needs the blocks behind the windows, too.
    windows = () if model.sees_whole_prompt else layer_windows(model)
    return replace(model, layer_windows=windows, has_states=bool(state_layers(model, 1)))


def _load_hf_config(path: Path, stored: dict[str, Any], head: dict[str, Any] | None) -> Any:
    """Return the configuration as an object of transformers.

    Args:
        stored: content of config.json.
        head: the configuration of a draft head in the layout of others, if config.json has another one.
    """
    AutoConfig = import_transformers().AutoConfig
    alias = MODEL_TYPE_ALIASES.get(str(stored.get("model_type")))
    try:
        if head is not None:
            return AutoConfig.for_model(**head)
        if alias is not None:
            return AutoConfig.for_model(**(stored | {"model_type": alias}))
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises errors of many kinds
        raise ModelLoadError(f"{path / 'config.json'}: {first_line(error)}") from error


def _add_modelopt(hf: Any, path: Path) -> None:
    """Add the quantization that older checkpoints of NVIDIA's Model Optimizer have in a file of its own."""
    quantization = read_json_object(path / "hf_quant_config.json").get("quantization")
    if not isinstance(quantization, dict) or not quantization.get("quant_algo"):
        return  # of the KV cache only
    if not getattr(hf, "quantization_config", None):
        hf.quantization_config = {"quant_method": "modelopt", **quantization}


def _text_model(hf: Any, architecture: str, name: str) -> tuple[Any, str]:
    """Return configuration and architecture of the text model, if there are others beside it.

    Raises:
        ConfigError: the text model is of another type than those that are served.
    """
    if architecture not in TEXT_MODELS:
        return hf, architecture
    text, served = hf.get_text_config(), TEXT_MODELS[architecture]
    if text.model_type not in served:
        raise ConfigError(
            f"{name}: architecture {architecture!r} is served with a text model of type {in_words(tuple(served))}, "
            f"not {text.model_type!r}"
        )
    for field in ("dtype", "quantization_config", "eos_token_id"):
        if getattr(hf, field, None) is not None and getattr(text, field, None) is None:
            setattr(text, field, getattr(hf, field))
    return text, served[text.model_type]


def _architecture(hf: Any, path: Path) -> str:
    architectures = getattr(hf, "architectures", None)
    if not isinstance(architectures, list | tuple) or not architectures:
        raise ModelLoadError(f"{path / 'config.json'}: names no architectures")
    stated = str(architectures[0])[:_MAX_NAME_CHARS]
    return ARCHITECTURE_ALIASES.get(stated, stated)


def _context_len(hf: Any, path: Path, has_own_decoder: bool) -> int:
    """Return the longest sequence that the model can continue, in tokens, with rope scaling as in vLLM.

    Args:
        has_own_decoder: the model is not served with the modules of transformers.
    """
    if getattr(hf, "max_position_embeddings", None) is None:
        has_field = getattr(hf, "seq_length", None) is not None
        return _positive_int(hf, "seq_length", path) if has_field else _DEFAULT_CONTEXT_LEN
    context_len = _positive_int(hf, "max_position_embeddings", path)
    rope = getattr(hf, "rope_parameters", None) or {}
    # YaRN extends the original context; many such configs give only the original in max_position_embeddings. In
    # transformers' own modules the base of `dynamic` depends on the longest sequence of the batch.
    original_lens = {"yarn": rope.get("original_max_position_embeddings") or 0, "linear": context_len}
    if has_own_decoder:
        original_lens["dynamic"] = context_len
    try:
        return max(
            context_len,
            int(original_lens.get(str(rope.get("rope_type")), 0) * float(rope.get("factor") or 1)),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelLoadError(
            f"{path / 'config.json'}: its rope_parameters cannot be read: {first_line(error)}"
        ) from error


def _size(hf: Any, fields: dict[str, Any], key: str) -> Any:
    """Return a size of the configuration, or None; attributes that differ between layers raise."""
    return fields[key] if key in fields else getattr(hf, key, None)


def _head_dim(hf: Any, fields: dict[str, Any], num_heads: int, path: Path) -> int:
    if given := _size(hf, fields, "head_dim"):
        return _check_positive(given, "head_dim", path)
    return _positive_int(hf, "hidden_size", path) // num_heads


def _num_kv_heads(hf: Any, fields: dict[str, Any], num_heads: int) -> int:
    if (count := _size(hf, fields, "num_key_value_heads")) is not None:
        return int(count)
    # Falcon's field names.
    if getattr(hf, "new_decoder_architecture", False):
        return int(hf.num_kv_heads)
    return 1 if getattr(hf, "multi_query", False) else num_heads


def _positive_int(hf: Any, key: str, path: Path) -> int:
    return _check_positive(getattr(hf, key, None), key, path)


def _check_positive(value: Any, key: str, path: Path) -> int:
    if not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"{path / 'config.json'}: {key} is {value!s:.100}, must be a positive number")
    return value


def end_token_ids(
    content: dict[str, Any], config_eos: object, model: Path, vocab_size: int
) -> tuple[int, ...]:
    """Return the ids of the tokens that end a sequence.

    As in transformers generation_config.json overrides config.json. As in vLLM the tokenizer's token is added:
    fine-tuned models often change it alone, for example to that which ends a message of their chat template.

    Args:
        content: content of generation_config.json.
        config_eos: ``eos_token_id`` of config.json.
        model: the model directory.
        vocab_size: number of the model's tokens.

    Raises:
        ModelLoadError: the entry is neither a token id nor a list of them.
    """
    ids = content.get("eos_token_id", config_eos)
    ids = [] if ids is None else [ids] if isinstance(ids, int) else ids
    if not isinstance(ids, list) or not all(isinstance(each, int) and abs(each) <= _MAX_ID for each in ids):
        raise ModelLoadError(f"{model}: eos_token_id is {ids!r:.100}, must be a token id or a list of them")
    own = _tokenizer_end(model)
    if own is not None and 0 <= own < vocab_size:
        ids = [*ids, own]
    return tuple(dict.fromkeys(ids))


def _tokenizer_end(model: Path) -> int | None:
    """Return the id of the tokenizer's end-of-sequence token. Returns None if its files do not show one."""
    config = read_json_object(model / "tokenizer_config.json")
    token = config.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, dict):
        entries = [
            (int(key), entry)
            for key, entry in listed.items()
            if key.isdecimal() and len(key) <= _MAX_DIGITS and isinstance(entry, dict)
        ]
    else:
        entries = _added_tokens(model / "tokenizer.json")
    return next((token_id for token_id, entry in entries if entry.get("content") == text), None)


def _added_tokens(file: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return id and entry of each added token of a tokenizer.json; none if it cannot be read."""
    try:
        added = json.loads(file.read_bytes())["added_tokens"]
        return [(int(entry["id"]), entry) for entry in added]
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
        return []  # the tokenizer is checked when it is loaded


def read_generation_config(model: Path) -> dict[str, Any]:
    """Return the file's content; empty if there is no file. Raises ModelLoadError if it cannot be read."""
    return read_json_object(model / FILE_NAME)


def sampling_defaults(content: dict[str, Any], model: Path) -> SamplingDefaults:
    """Return the defaults of sampling settings that a request leaves out.

    As in vLLM, the file's ``do_sample`` and lengths are ignored: a request turns sampling off by its temperature, and
    sets the length of its output itself.

    Raises:
        ModelLoadError: a setting is not a number or out of its range.
    """
    given: dict[str, Any] = {}
    for field in fields(SamplingDefaults):
        value = content.get(field.name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= _MAX_VALUE:
            raise ModelLoadError(
                f"{model / FILE_NAME}: {field.name} is {value!r:.100}, must be a number of at most {_MAX_VALUE}"
            )
        given[field.name] = int(value) if field.name == "top_k" else float(value)
    defaults = SamplingDefaults(**given)
    try:
        check_sampling_settings(defaults, FILE_NAME)
    except InvalidRequest as error:
        raise ModelLoadError(f"{model}: {error}") from error
    return defaults
