"""Constraint of a chat's reply to tool calls, from tool_choice and strict functions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...proto.errors import InvalidRequest
from ...proto.structured_outputs import StructuredOutputsParams
from ..chat_format.tool_structures import FunctionSchema, ToolStructure
from .chat import Chat

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
    if not chat.forces_tool_call and not any(tool["function"].get("strict") for tool in chat.tools):
        return None
    functions = _functions(chat)
    if chat.forces_tool_call:
        field = "chat.tool_choice"
        if form is not None:
            raise InvalidRequest(field, "forces a tool call, must be auto or none with structured_outputs")
        called = [each for each in functions if chat.named_function in (None, each.name)]
        tag = _structure(field, structure).calls(called, allows_parallel_calls=chat.parallel_tool_calls)
    elif functions:
        field = "chat.tools"
        if form is not None:
            raise InvalidRequest(field, "have strict functions, must have none with structured_outputs")
        known = _structure(field, structure)
        if not known.trigger:
            raise InvalidRequest(
                field, "have strict functions, which this model's format needs tool_choice for"
            )
        tag = known.calls_in_text(functions, allows_parallel_calls=chat.parallel_tool_calls)
    else:
        return None
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": tag})


def _functions(chat: Chat) -> list[FunctionSchema]:
    return [_function(tool["function"]) for tool in chat.tools] if chat.offers_tools else []


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
