"""Checks of a model directory before anything reads it: sizes that no model has would take minutes or all memory.

transformers makes a list with an entry per layer, there is a rotary frequency per pair of a head's dimensions, and
the ranks would see the rest only after Ray has started.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ...proto.errors import ModelLoadError, first_line
from ...proto.options.values import show

MAX_CONFIG_BYTES = 8 << 20
# Headers of safetensors files are JSON; one of 100 MB with a million tensors takes 4 s to read on each rank. The
# largest models have some 100,000 tensors in more than 100 files.
MAX_HEADER_BYTES = 16 << 20
_MAX_DEPTH = 16
# Files that vocabularies of tokenizers come in.
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab*", "*.tiktoken", "tekken.json")

# Entry of a config.json, at any depth |-> the smallest and the largest value with which a model can be served, also
# in lists.
_SIZES = (
    dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), (1, 4096))
    | dict.fromkeys(
        ("num_layers", "encoder_layers", "decoder_layers", "depth", "num_nextn_predict_layers"), (0, 4096)
    )
    | dict.fromkeys(
        ("num_mtp_layers", "num_mtp_modules", "num_kv_shared_layers", "first_k_dense_replace"), (0, 4096)
    )
    | {"mtp_num_hidden_layers": (0, 4096)}
    | {"attention_types": (0, 4096), "num_labels": (0, 1 << 16)}
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), (1, 16_384))
    | dict.fromkeys(("num_key_value_heads", "num_kv_heads", "head_dim"), (0, 16_384))
    | dict.fromkeys(
        ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), (0, 16_384)
    )
    | dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), (0, 16_384)
    )
    | dict.fromkeys(("hidden_size", "n_embd", "d_model"), (1, 1 << 20))
    | dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner"), (0, 1 << 24))
    | {"vocab_size": (1, 1 << 24)}
    | dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "seq_length"), (1, 1 << 27))
)


def read_config_file(path: Path) -> dict[str, Any]:
    """Return a config.json. Raises ModelLoadError if it is not a JSON object, or has a size that no model has."""
    content = read_json_object(path, is_optional=False)
    for name, value in _entries(content, path):
        if name not in _SIZES or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        low, high = _SIZES[name]
        if not low <= value <= high:
            raise ModelLoadError(f"{path}: {name} is {show(value)}, must be from {low} to {high}")
    return content


def read_json_object(path: Path, *, is_optional: bool = True) -> dict[str, Any]:
    """Return a JSON object of a model directory; empty for an optional file that is absent. Raises ModelLoadError."""
    content = {} if is_optional and not path.is_file() else _read_json(path)
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: is not a JSON object")
    return content


def read_json_list(path: Path) -> list[Any]:
    """Return a JSON list of a model directory; empty if there is no such file. Raises ModelLoadError."""
    content = _read_json(path) if path.is_file() else []
    if not isinstance(content, list):
        raise ModelLoadError(f"{path}: is not a JSON list")
    return content


def check_model_files(folder: Path, with_weights: bool) -> None:
    """Raises ModelLoadError if the folder lacks a file, or is in another format. No file is read."""
    is_gguf = folder.suffix == ".gguf" if not folder.is_dir() else any(folder.glob("*.gguf"))
    if is_gguf and not (folder.is_dir() and any(folder.glob("*.safetensors"))):
        raise ModelLoadError(
            f"{folder}: GGUF is not supported; take the model in safetensors that it was made from, with "
            "--quantization int8 for smaller weights"
        )
    if not folder.is_dir():
        raise ModelLoadError(
            f"{folder}: not a directory; MODEL is a Hugging Face model directory, ORG/NAME on the Hugging Face Hub, "
            f"or 'demo'"
        )
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder}: no config.json")
    if with_weights and not any(folder.glob("*.safetensors")):
        raise ModelLoadError(f"{folder}: no *.safetensors file")


def check_tokenizer_files(folder: Path) -> None:
    """Raises ModelLoadError if the folder has no vocabulary: transformers makes an empty tokenizer of nothing."""
    if not any(path.is_file() for pattern in _VOCABULARIES for path in folder.glob(pattern)):
        raise ModelLoadError(
            f"{folder}: no tokenizer ({', '.join(_VOCABULARIES)}); copy it from the model that this one was made "
            "from, or serve token ids alone with skip_tokenizer_init"
        )


def check_weight_files(folder: Path) -> None:
    """Raises ModelLoadError if a safetensors file has a header that cannot be read, or is shorter than it says."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                _check_weight_file(path, file)
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error


def _check_weight_file(path: Path, file: BinaryIO) -> None:
    file_len = os.fstat(file.fileno()).st_size
    header_len = int.from_bytes(file.read(8), "little")
    if header_len > MAX_HEADER_BYTES:
        raise ModelLoadError(
            f"{path}: its header length is {header_len} bytes, must be at most {MAX_HEADER_BYTES}; "
            "split the weights into more files"
        )
    try:
        header = json.loads(file.read(header_len))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected_len = 8 + header_len + max(ends, default=0)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: its header cannot be read: {first_line(error)}") from error
    if file_len < expected_len:
        raise ModelLoadError(
            f"{path}: has {file_len} bytes, but its header lists {expected_len}: it is truncated; copy or download "
            "it again"
        )


def _read_json(path: Path) -> Any:
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_CONFIG_BYTES:
            raise ModelLoadError(f"{path}: has {num_bytes} bytes, must have at most {MAX_CONFIG_BYTES}")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: is not valid JSON: {first_line(error)}") from error


def _entries(value: Any, path: Path, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a table and of the tables in it; of a list, each value with the name of the list."""
    if depth > _MAX_DEPTH:
        raise ModelLoadError(f"{path}: its tables and lists are nested more than {_MAX_DEPTH} deep")
    if isinstance(value, dict):
        for own_name, own in value.items():
            yield from _entries(own, path, own_name, depth + 1)
    elif isinstance(value, list):
        for each in value:
            yield from _entries(each, path, name, depth + 1)
    else:
        yield name, value
