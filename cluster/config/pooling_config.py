"""The task of a model directory, and its pooling: sentence-transformers' files, or a classification head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...proto.config import DenseConfig, PoolingConfig
from ...proto.errors import ConfigError, ModelLoadError
from ...proto.model.registry import FAMILIES
from .model_checks import read_json_list, read_json_object

_CLASSIFIER, _BASE, _CAUSAL = "ForSequenceClassification", "Model", "ForCausalLM"
# Field of 1_Pooling/config.json |-> pooling type of quire; other fields that begin alike are not supported.
_POOLING_MODES = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_MODE_NAMES = {"lasttoken": "last", "last": "last", "mean": "mean", "cls": "cls"}
_TRANSFORMER, _POOLING, _DENSE, _NORMALIZE, _LOGIT_SCORES = (
    "Transformer",
    "Pooling",
    "Dense",
    "Normalize",
    ("LogitScore", "CausalScoreHead"),
)
# The last part of the name of a class of torch.nn |-> activation.
_ACTIVATIONS = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_DENSE_ACTIVATIONS = {
    "Identity": "none",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
# Numbers of an embedding, and layers in a row: each rank holds them in full.
_MAX_FEATURES, _MAX_DENSE = 1 << 16, 8
_MAX_FOLDER_CHARS = 255  # of a file's name in Linux
_PROBLEM_ACTIVATIONS = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


@dataclass(frozen=True, slots=True)
class Task:
    """The task of a model.

    Attributes:
        architecture: name of the model with a head that generates, whether the checkpoint has one or not.
        generates: the model generates text.
        pooling: None for a model whose prompts are not pooled.
        max_len: longest prompt that sentence-transformers allows; None without its files.
    """

    architecture: str
    generates: bool
    pooling: PoolingConfig | None
    max_len: int | None = None


def read_task(path: Path, hf: dict[str, Any], architecture: str, runner: str) -> Task:
    """Return the task of a model directory.

    Args:
        hf: its configuration, with defaults filled in.
        architecture: the name in config.json.
        runner: the option of this name; ``auto`` for what the directory shows.

    Raises:
        ConfigError: the model is not of that kind, or its pooling is not supported.
        ModelLoadError: a file cannot be read.
    """
    is_causal = architecture.endswith(_CAUSAL)
    causal = architecture if is_causal else _body_name(architecture) + _CAUSAL
    pooling = _published_pooling(path, hf, architecture)
    if runner == "generate" or (runner == "auto" and pooling is None):
        return Task(architecture, True, None)
    if runner == "both" and not is_causal:
        raise ConfigError(f"runner is 'both', but {architecture} has no head that generates; use 'pooling'")
    _check_causal(path, hf)
    if pooling is None:
        pooling = PoolingConfig("last", _hidden_size(path, hf), activation="normalize")
    max_len = read_json_object(path / "sentence_bert_config.json").get("max_seq_length")
    is_len = isinstance(max_len, int) and not isinstance(max_len, bool) and max_len >= 1
    return Task(causal, runner == "both", pooling, max_len if is_len else None)


def _body_name(architecture: str) -> str:
    """Return the name of an architecture without its head, for example ``Qwen3``."""
    return architecture.removesuffix(_CLASSIFIER).removesuffix(_BASE).removesuffix("Text")


def _published_pooling(path: Path, hf: dict[str, Any], architecture: str) -> PoolingConfig | None:
    """Return the pooling that the directory shows. Returns None for a model that generates only."""
    if architecture.endswith(_CLASSIFIER):
        return _classifier(path, hf)
    modules = read_json_list(path / "modules.json")
    if modules:
        return _from_modules(path, hf, modules)
    if _body_name(architecture) + _CAUSAL in FAMILIES and architecture.endswith(_BASE):
        return PoolingConfig("last", _hidden_size(path, hf), activation="normalize")
    return None


def _classifier(path: Path, hf: dict[str, Any]) -> PoolingConfig:
    names = hf.get("id2label") or {}
    count = len(names) or int(hf.get("num_labels") or 0)
    if not 1 <= count <= 1 << 16:
        raise ModelLoadError(f"{path / 'config.json'}: has {count} labels, must have 1 to 65536")
    labels = tuple(str(names.get(index, names.get(str(index), f"LABEL_{index}"))) for index in range(count))
    default = _PROBLEM_ACTIVATIONS.get(str(hf.get("problem_type")), "softmax" if count > 1 else "sigmoid")
    own = (hf.get("sentence_transformers") or {}).get("activation_fn") or hf.get(
        "sbert_ce_default_activation_function"
    )
    activation = _activation(own, path / "config.json") or default
    return PoolingConfig("last", _hidden_size(path, hf), labels, activation)


def _from_modules(path: Path, hf: dict[str, Any], modules: list[Any]) -> PoolingConfig:
    """Return the pooling of sentence-transformers' modules.json, which lists classes and their folders."""
    pooling: PoolingConfig | None = None
    for module in modules:
        kind, folder = _module(module, path)
        if kind == _POOLING:
            pooling = _pooling_module(path / folder / "config.json", path, hf)
        elif kind == _DENSE and pooling is not None and pooling.activation == "none":
            pooling = replace(pooling, dense=(*pooling.dense, _dense_module(path, folder, pooling)))
        elif kind == _NORMALIZE and pooling is not None:
            pooling = replace(pooling, activation="normalize")
        elif kind in _LOGIT_SCORES:
            pooling = _logit_score(path / folder / "config.json", path, hf)
        elif kind != _TRANSFORMER:
            raise ConfigError(
                f"{path / 'modules.json'}: module {kind:.100} is not supported here, must be Transformer, Pooling, "
                "Dense, Normalize or LogitScore, in this order"
            )
    if pooling is None:
        raise ConfigError(f"{path / 'modules.json'}: has no Pooling and no LogitScore")
    return pooling


def _module(module: Any, path: Path) -> tuple[str, str]:
    """Return the class of a module, without its package, and its folder."""
    if not isinstance(module, dict) or not isinstance(module.get("type"), str):
        raise ModelLoadError(f"{path / 'modules.json'}: an entry has no type")
    folder = module.get("path", "")
    is_name = isinstance(folder, str) and len(folder) <= _MAX_FOLDER_CHARS
    if not is_name or Path(folder).is_absolute() or ".." in Path(folder).parts:
        raise ModelLoadError(f"{path / 'modules.json'}: path {folder!r:.100} is not a folder of the model")
    return module["type"].rpartition(".")[2], folder


def _pooling_module(file: Path, path: Path, hf: dict[str, Any]) -> PoolingConfig:
    content = read_json_object(file)
    named = content.get("pooling_mode")
    modes = [named] if isinstance(named, str) else list(named or [])
    modes += [key for key, is_on in content.items() if key.startswith("pooling_mode_") and is_on is True]
    kinds = [(_POOLING_MODES | _MODE_NAMES).get(str(mode)) for mode in modes]
    if len(kinds) != 1 or kinds[0] is None:
        supported = ", ".join(sorted(set(_POOLING_MODES.values())))
        shown = ", ".join(map(str, modes)) or "none"
        raise ConfigError(f"{file}: pooling {shown:.100} is not supported, must be one of {supported}")
    if content.get("include_prompt", True) is not True:
        raise ConfigError(f"{file}: include_prompt is false, must be true: a prompt is pooled as a whole")
    dimensions = hf.get("matryoshka_dimensions") or ()
    return PoolingConfig(kinds[0], _hidden_size(path, hf), dimensions=tuple(sorted(map(int, dimensions))))


def _dense_module(path: Path, folder: str, pooling: PoolingConfig) -> DenseConfig:
    """Read a linear layer between Pooling and Normalize; its inputs are what the modules before it return."""
    file = path / folder / "config.json"
    content = read_json_object(file)
    num_inputs, num_outputs = pooling.embedding_size, content.get("out_features", 0)
    is_number = isinstance(num_outputs, int) and not isinstance(num_outputs, bool)
    if content.get("in_features") != num_inputs or not is_number or not 1 <= num_outputs <= _MAX_FEATURES:
        raise ModelLoadError(
            f"{file}: in_features and out_features are {content.get('in_features')} and {num_outputs}, must be "
            f"{num_inputs} and 1 to {_MAX_FEATURES}"
        )
    for key in ("module_input_name", "module_output_name"):
        if content.get(key, "sentence_embedding") not in (None, "sentence_embedding"):
            raise ConfigError(
                f"{file}: {key} {content[key]!r:.100} is not supported, must be sentence_embedding"
            )
    if len(pooling.dense) == _MAX_DENSE:
        raise ConfigError(f"{path / 'modules.json'}: has more than {_MAX_DENSE} modules Dense")
    activation = _activation(content.get("activation_function"), file, _DENSE_ACTIVATIONS) or "tanh"
    return DenseConfig(folder, num_inputs, num_outputs, content.get("bias", True) is True, activation)


def _logit_score(file: Path, path: Path, hf: dict[str, Any]) -> PoolingConfig:
    content = read_json_object(file)
    ids = [content.get(key) for key in ("true_token_id", "false_token_id")]
    token_ids = tuple(each for each in ids if each is not None)
    vocab_size = hf.get("vocab_size") or 0
    if ids[0] is None or not all(isinstance(each, int) and 0 <= each < vocab_size for each in token_ids):
        raise ModelLoadError(f"{file}: true_token_id and false_token_id are {ids}, must be of the vocabulary")
    settings = path / "config_sentence_transformers.json"
    activation = _activation(read_json_object(settings).get("activation_fn"), settings) or "sigmoid"
    return PoolingConfig("last", _hidden_size(path, hf), ("LABEL_0",), activation, token_ids)


def _activation(name: Any, file: Path, known: dict[str, str] = _ACTIVATIONS) -> str | None:
    """Return the activation of a class of torch.nn; None for no class. Raises ConfigError for an unknown one."""
    if not name:
        return None
    kind = str(name).rpartition(".")[2]
    if kind not in known:
        raise ConfigError(f"{file}: activation {name!s:.100} is not supported, must be {', '.join(known)}")
    return known[kind]


def _check_causal(path: Path, hf: dict[str, Any]) -> None:
    """Refuse a model whose tokens see those after them: prompts are computed in chunks, in their order."""
    for key, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        if hf.get(key) is value:
            raise ConfigError(
                f"{path / 'config.json'}: {key} is {str(value).lower()}, so a token sees those after it; only "
                "decoders are served"
            )


def _hidden_size(path: Path, hf: dict[str, Any]) -> int:
    size = hf.get("hidden_size")
    if not isinstance(size, int) or size < 1:
        raise ModelLoadError(
            f"{path / 'config.json'}: hidden_size is {size!s:.100}, must be a positive number"
        )
    return size
