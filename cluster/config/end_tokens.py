"""A model's end-of-sequence tokens: those of its configurations, and the one of its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...proto.errors import ModelLoadError
from .model_checks import read_json_object

# Of a token's id, which some models have beyond the vocabulary or as -1 for none.
_MAX_ID = (1 << 31) - 1
_MAX_DIGITS = len(str(_MAX_ID))


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
        vocab_size: of the model.

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
