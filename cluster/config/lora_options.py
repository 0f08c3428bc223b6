"""The options of LoRA adapters: lora_modules, in the forms that vLLM's users write, and lora_target_modules."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...proto.errors import ConfigError
from ...proto.lora import MAX_LORA_NAME_CHARS
from .value_kinds import ValueKind

MAX_LORAS = 1024
MAX_LORA_RANK = 512
# Adapters that a gateway knows by name.
MAX_LORA_MODULES = 1024

_MODULE = re.compile(r"\w+(\.\w+)*")

Modules = tuple[tuple[str, str], ...]


def check_lora_options(options: Any) -> None:
    """Raises ConfigError for options of adapters that exclude each other."""
    if options.lora_modules and not options.enable_lora:
        raise ConfigError("lora_modules are given, but enable_lora is not")
    if options.lora_target_modules is not None and not options.enable_lora:
        raise ConfigError("lora_target_modules are given, but enable_lora is not")
    names = [name for name, _ in options.lora_modules]
    if options.name in names:
        raise ConfigError(f"lora_modules has {options.name!r}, which is the name of the model")
    most = options.max_cpu_loras
    if most is not None and most < options.max_loras:
        raise ConfigError(f"max_cpu_loras is {most}, must be at least max_loras, {options.max_loras}")


def check_lora_modules(name: str, value: Sequence[tuple[str, str]]) -> str | None:
    """Return why adapters are not allowed; None if they are. A check of the option."""
    if len(value) > MAX_LORA_MODULES:
        return f"{name} has {len(value)} adapters, must have at most {MAX_LORA_MODULES}"
    names = [key for key, _ in value]
    for key, path in value:
        if not 1 <= len(key) <= MAX_LORA_NAME_CHARS or not path:
            return f"{name} has {key!r} in {path!r}, must be NAME=PATH"
        if names.count(key) > 1:
            return f"{name} has {key!r} {names.count(key)} times, must have it once"
    return None


def check_target_modules(name: str, value: str) -> str | None:
    """Return why target modules are not allowed; None if they are. A check of the option."""
    if not all(_MODULE.fullmatch(each) for each in value.split(",")):
        return f"{name} is {value!r}, must be names of modules separated by commas, like q_proj,mlp.experts"
    return None


def _read(value: Any) -> Modules:
    if isinstance(value, str | bytes):
        raise ValueError(value)
    entries = value.items() if isinstance(value, Mapping) else value
    return tuple(_read_entry(entry) for entry in entries)


def _read_entry(entry: Any) -> tuple[str, str]:
    if isinstance(entry, str) and entry.startswith("{"):
        given = json.loads(entry)
        entry = given.get("name"), given.get("path")
    elif isinstance(entry, str):
        name, equals, path = entry.partition("=")
        if not equals:
            raise ConfigError(f"adapter is {entry!r}, must be like sql=/adapters/sql")
        entry = name, path
    name, path = entry
    if not isinstance(name, str) or not isinstance(path, str):
        raise ValueError(entry)
    return name, str(Path(path).expanduser().absolute()) if path else ""


# In TOML and Python a table, elsewhere NAME=PATH or vLLM's JSON object.
LORA_MODULES = ValueKind(
    "a table of names and paths", _read, lambda text: text.split(","), dict, is_repeated=True
)
