"""Constraint of a chat's reply to tool calls, from tool_choice and strict functions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ....proto.errors import InvalidRequest
from ....proto.structured_outputs import StructuredOutputsParams
from ..chat_format.tool_structures import FunctionSchema, ToolStructure
from .chat import Chat

# What is wrong with a request that asks for another form too.
_CONFLICTS = {
    "required": "forces a tool call, must be auto or none with structured_outputs",
    "chat.tool_choice": "restricts tool calls, must be auto or none with structured_outputs",
    "chat.tools": "have strict functions, must have none with structured_outputs",
}
# What is wrong if calls within text cannot be told from the text.
_NO_TRIGGER = {
    "chat.tool_choice": "allows some tools beside text, which this model's format cannot; the mode must be required",
    "chat.tools": "have strict functions, which this model's format needs tool_choice for",
}
# Names stand in texts and in JSON strings of a reply without being escaped.
_NAME = re.compile(r"[\w.\-]{1,256}")


def tool_constraint(
    chat: Chat, structure: ToolStructure | None, form: StructuredOutputsParams | None
) -> StructuredOutputsParams | None:
    """Return the constraint of the reply; None if tool_choice and the functions ask for none.

    Args:
        structure: of the model's tool calls; None if it is not known.
        form: the form that the request asks of the reply itself.

    Raises:
        InvalidRequest: the model's format of tool calls cannot be forced, or the request asks for another form too.
    """
    choice = chat.choice
    functions = [tool["function"] for tool in chat.tools if chat.offers_tools]
    if choice.names is not None:
        functions = [function for function in functions if function["name"] in choice.names]
    is_required = choice.mode == "required"
    is_restricted = is_required or choice.names is not None
    if not is_restricted and not any(function.get("strict") for function in functions):
        return None
    field = "chat.tool_choice" if is_restricted else "chat.tools"
    if form is not None:
        raise InvalidRequest(field, _CONFLICTS["required" if is_required else field])
    known = _structure(field, structure)
    called = list(map(_function, functions))
    if is_required:
        tag = known.calls(called, allows_parallel_calls=chat.parallel_tool_calls)
    elif known.trigger:
        tag = known.calls_in_text(called, allows_parallel_calls=chat.parallel_tool_calls)
    else:
        raise InvalidRequest(field, _NO_TRIGGER[field])
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": tag})


def _function(function: Mapping[str, Any]) -> FunctionSchema:
    if not _NAME.fullmatch(function["name"]):
        problem = "has characters that no grammar writes, must be letters, digits, _, - and ."
        raise InvalidRequest("chat.tools.function.name", problem)
    return FunctionSchema(
        function["name"], function.get("parameters") or {}, is_strict=bool(function.get("strict"))
    )


def _structure(field: str, structure: ToolStructure | None) -> ToolStructure:
    if structure is None:
        raise InvalidRequest(
            field,
            "needs a format of tool calls that grammars can force, which this model has not; must be auto",
        )
    return structure
