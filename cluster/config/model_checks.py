"""Checks of a model directory before anything reads it: sizes that no model has would take minutes or all memory.

transformers makes a list with an entry per layer, there is a rotary frequency per pair of a head's dimensions, and
the ranks would see the rest only after Ray has started.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...proto.errors import ModelLoadError, first_line
from .checks import show

MAX_CONFIG_BYTES = 8 << 20
# Headers of safetensors files are JSON; one of 100 MB with a million tensors takes 4 s to read on each rank. The
# largest models have some 100,000 tensors in more than 100 files.
MAX_HEADER_BYTES = 16 << 20
_MAX_DEPTH = 16

# Entry of a config.json, at any depth |-> the smallest and the largest value with which a model can be served.
_SIZES = (
    dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), (1, 4096))
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), (1, 16_384))
    | dict.fromkeys(("num_key_value_heads", "num_kv_heads", "head_dim"), (0, 16_384))
    | dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), (0, 16_384)
    )
    | dict.fromkeys(("hidden_size", "n_embd", "d_model"), (1, 1 << 20))
    | dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner"), (0, 1 << 24))
    | {"vocab_size": (1, 1 << 24)}
    | dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "seq_length"), (1, 1 << 27))
)


def check_config_file(path: Path) -> None:
    """Raises ModelLoadError if a config.json is not a JSON object, or has a size that no model has."""
    for name, value in _entries(_read_object(path), path):
        if name not in _SIZES or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        low, high = _SIZES[name]
        if not low <= value <= high:
            raise ModelLoadError(f"{path}: {name} is {show(value)}, must be from {low} to {high}")


def check_weight_headers(folder: Path) -> None:
    """Raises ModelLoadError if a safetensors file of the folder has a header that is too long to be read."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                num_bytes = int.from_bytes(file.read(8), "little")
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
        if num_bytes > MAX_HEADER_BYTES:
            raise ModelLoadError(
                f"{path}: its header length is {num_bytes} bytes, must be at most {MAX_HEADER_BYTES}; "
                "split the weights into more files"
            )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_CONFIG_BYTES:
            raise ModelLoadError(f"{path}: has {num_bytes} bytes, must have at most {MAX_CONFIG_BYTES}")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: is not valid JSON: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: is not a JSON object")
    return content


def _entries(table: dict[str, Any], path: Path, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a table and of the tables in it."""
    if depth > _MAX_DEPTH:
        raise ModelLoadError(f"{path}: its tables are nested more than {_MAX_DEPTH} deep")
    for name, value in table.items():
        yield name, value
        if isinstance(value, dict):
            yield from _entries(value, path, depth + 1)
