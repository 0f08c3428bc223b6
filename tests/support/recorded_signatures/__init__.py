"""Signatures of other libraries' functions, recorded from their sources: each file names the version and its date."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

_KINDS = {
    "positional": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "keyword": inspect.Parameter.KEYWORD_ONLY,
    "var_positional": inspect.Parameter.VAR_POSITIONAL,
    "var_keyword": inspect.Parameter.VAR_KEYWORD,
}
# Text of a default |-> its value. Others are never looked at.
_DEFAULTS = {"None": None, "True": True, "False": False}


class Signatures:
    """The recorded signatures of a library."""

    def __init__(self, library: str) -> None:
        recorded = json.loads(Path(__file__).with_name(f"{library}.json").read_text())
        self.version: str = recorded["version"]
        self._signatures = {name: _signature(each) for name, each in recorded["signatures"].items()}

    def bind(self, name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments of a call by name, defaults included. Raises TypeError as the function would."""
        bound = self._signatures[name].bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)


def _signature(parameters: list[list[Any]]) -> inspect.Signature:
    made = []
    for name, kind, _, default in parameters:
        value = inspect.Parameter.empty if default is None else _value(default)
        made.append(inspect.Parameter(name, _KINDS[kind], default=value))
    return inspect.Signature(made)


def _value(default: str) -> Any:
    if default in _DEFAULTS:
        return _DEFAULTS[default]
    try:
        return json.loads(default.replace("'", '"'))
    except json.JSONDecodeError:
        return default
