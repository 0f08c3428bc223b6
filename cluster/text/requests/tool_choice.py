"""ToolChoice: which functions the reply of a chat may call, and whether it must."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ....proto.errors import InvalidRequest
from .chat_messages import check_function
from .json_values import check_count, check_mapping, show_value

_MODES = ("none", "auto", "required")
_ALLOWED = "allowed_tools"
_ALLOWED_MODES = ("auto", "required")
_MAX_ALLOWED = 1024


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """A checked `Chat.tool_choice`.

    Attributes:
        mode: ``none``; ``auto``, the model decides; or ``required``, the reply is one or more calls.
        names: functions that the reply may call; None for all.
    """

    mode: str
    names: tuple[str, ...] | None = None

    @staticmethod
    def of(choice: str | Mapping[str, Any]) -> ToolChoice:
        """Return a checked choice from its form in OpenAI's API."""
        if isinstance(choice, str):
            return ToolChoice(choice)
        if is_allowed_tools(choice):
            allowed = choice[_ALLOWED]
            return ToolChoice(allowed["mode"], tuple(tool["function"]["name"] for tool in allowed["tools"]))
        return ToolChoice("required", (choice["function"]["name"],))


def allowed_tools(mode: Any, tools: Any) -> dict[str, Any]:
    """Return the choice of some functions in the form of /v1/chat/completions."""
    return {"type": _ALLOWED, _ALLOWED: {"mode": mode, "tools": tools}}


def is_allowed_tools(choice: str | Mapping[str, Any]) -> bool:
    """Return whether a choice, which need not be checked yet, is of the kind that lists functions."""
    return not isinstance(choice, str) and choice.get("type") == _ALLOWED


def check_tool_choice(field: str, choice: object, functions: Collection[str]) -> None:
    """Check a choice in the form of OpenAI's API.

    Args:
        functions: names of the tools.

    Raises:
        InvalidRequest: it is of another form, or names a function that is not among the tools.
    """
    if not isinstance(choice, Mapping):
        if choice not in _MODES:
            allowed = "auto, none, required, the name of a function or allowed_tools"
            raise InvalidRequest(field, f"is {show_value(choice)}, must be {allowed}")
        if choice == "required" and not functions:
            raise InvalidRequest(field, "is 'required', but there are no tools")
    elif is_allowed_tools(choice):
        _check_allowed(f"{field}.{_ALLOWED}", choice.get(_ALLOWED), functions)
    else:
        _check_named(field, choice, functions)


def _check_allowed(field: str, value: object, functions: Collection[str]) -> None:
    allowed = check_mapping(field, value)
    mode, tools = allowed.get("mode"), allowed.get("tools", ())
    if mode not in _ALLOWED_MODES:
        raise InvalidRequest(f"{field}.mode", f"is {show_value(mode)}, must be auto or required")
    check_count(f"{field}.tools", tools, 1, _MAX_ALLOWED)
    for index, tool in enumerate(tools):
        where = f"{field}.tools[{index}]"
        _check_named(where, check_mapping(where, tool), functions)


def _check_named(field: str, choice: Mapping[str, Any], functions: Collection[str]) -> None:
    name = check_function(field, choice)["name"]
    if name not in functions:
        raise InvalidRequest(field, f"names {show_value(name)}, which is not among the tools")
