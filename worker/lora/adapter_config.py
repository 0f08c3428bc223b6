"""AdapterConfig: the part of PEFT's adapter_config.json that quire applies. Everything else is refused by name.

The file is untrusted: its size is bounded, and nothing in it is executed, not even as a regular expression.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20

# Settings that change the result in a way that quire does not compute, with the values that do not.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "corda_config": (None, {}),
}
# Initializations that change the base model's weights beside the adapter.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.]+")
# PEFT 0.21 writes ``.*\.gate_up_proj`` for experts that it has fused; the end of a name matches without it, too.
_ANY_PREFIX = r".*\."


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A valid adapter_config.json.

    Attributes:
        rank: of modules without one of their own.
        alpha: of modules without one of their own.
        is_rank_stabilized: the scaling is alpha / sqrt(rank) (Kalajdzievski, rsLoRA, 2023), not alpha / rank.
        ensures_tying: an adapter of one of the embedding and the head is that of the other, too, if they are tied.
        ranks, alphas: module name, or the end of one after a dot |-> its own.
    """

    rank: int
    alpha: float
    is_rank_stabilized: bool
    ensures_tying: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        return int(_own(self.ranks, module, self.rank))

    def scaling_of(self, module: str) -> float:
        """Return the factor of the module's update."""
        rank, alpha = self.rank_of(module), _own(self.alphas, module, self.alpha)
        return alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank


def read_adapter_config(folder: Path, max_rank: int) -> AdapterConfig:
    """Return the configuration of an adapter.

    Raises:
        ValueError: the adapter is not supported, or the file is malformed.
        OSError: the file cannot be read.
    """
    path = folder / CONFIG_NAME
    with path.open("rb") as file:
        text = file.read(MAX_CONFIG_BYTES + 1)
    if len(text) > MAX_CONFIG_BYTES:
        raise ValueError(f"{CONFIG_NAME} has more than {MAX_CONFIG_BYTES} bytes")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{CONFIG_NAME} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{CONFIG_NAME} is not a JSON object")
    _check_supported(values)
    rank = _read_rank("r", values.get("r", 8), max_rank)
    ranks = _read_table(values, "rank_pattern")
    alphas = _read_table(values, "alpha_pattern")
    return AdapterConfig(
        rank,
        _read_number("lora_alpha", values.get("lora_alpha", 8)),
        values.get("use_rslora") is True,
        values.get("ensure_weight_tying") is True,
        {name: _read_rank(f"rank_pattern[{name!r}]", each, max_rank) for name, each in ranks.items()},
        {name: _read_number(f"alpha_pattern[{name!r}]", each) for name, each in alphas.items()},
    )


def _check_supported(values: Mapping[str, Any]) -> None:
    kind = values.get("peft_type", "LORA")
    if kind != "LORA":
        raise ValueError(f"peft_type is {kind!r}, must be 'LORA'")
    for name, harmless in _UNSUPPORTED.items():
        value = values.get(name)
        if not any(value == each and type(value) is type(each) for each in harmless):
            raise ValueError(f"{name} is {value!r}, which is not supported; must be {harmless[0]!r}")
    init = values.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        raise ValueError(
            f"init_lora_weights is {init!r}, which changes the base model; convert the adapter to plain LoRA, see "
            "path_initial_model_for_weight_conversion in PEFT"
        )


def _read_rank(name: str, value: Any, max_rank: int) -> int:
    if type(value) is not int or not 1 <= value <= max_rank:
        raise ValueError(f"{name} is {value!r}, must be from 1 to {max_rank}; see max_lora_rank")
    return value


def _read_number(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= 1e6:
        raise ValueError(f"{name} is {value!r}, must be a number from -1e6 to 1e6")
    return float(value)


def _read_table(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a table by module. Regular expressions, which PEFT allows, could take forever: few are understood."""
    table = values.get(name) or {}
    if not isinstance(table, dict):
        raise ValueError(f"{name} is {table!r}, must be an object")
    plain: dict[str, Any] = {}
    for key, value in table.items():
        own = key.removeprefix(_ANY_PREFIX).replace(r"\.", ".")
        if not _PLAIN_NAME.fullmatch(own):
            raise ValueError(f"{name} has the key {key!r}; only plain names of modules are supported")
        plain.setdefault(own, value)
    return plain


def _own(table: Mapping[str, float], module: str, default: float) -> float:
    """Return the entry for a module: of its whole name, or of an end of it that begins after a dot."""
    parts = module.split(".")
    ends = (".".join(parts[index:]) for index in range(len(parts)))
    return next((table[end] for end in ends if end in table), default)
