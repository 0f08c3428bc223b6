"""Body of /v1/responses, and its items as messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from .....proto.errors import InvalidRequest
from .....proto.sampling import SamplingParams
from .....proto.structured_outputs import StructuredOutputsParams
from ....text.requests.chat import Chat, allowed_tools, is_allowed_tools
from ..structured_output import ResponseFormat, requested_constraint, schema_constraint
from .bounded import Entries, JsonObject, JsonObjects, Members, TextOrObject, TextOrObjects
from .peer_fields import REFUSED, UNSET, Refusal
from .sampling_fields import OutputFields

Message = dict[str, Any]

_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


class ResponseRequest(OutputFields):
    """OpenAI's fields, and vLLM's beside them."""

    input: TextOrObjects
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = Field(None, description="Keep the response for a while; true if missing.")
    background: bool | None = Field(
        None, description="Make the response whether or not a client waits for it; it can be fetched later."
    )
    max_output_tokens: int | None = None
    tools: JsonObjects | None = None
    tool_choice: TextOrObject | None = Field(
        None, description="none, auto, required, a function or allowed_tools."
    )
    parallel_tool_calls: bool | None = None
    reasoning: JsonObject | None = Field(None, description="Its effort is a variable of the chat template.")
    text: JsonObject | None = Field(None, description="Its format is text, json_object or json_schema.")
    metadata: Members[str, str] | None = None
    chat_template_kwargs: JsonObject | None = Field(None, description="Variables of the chat template.")
    include: Entries[str] = Field([], description="message.output_text.logprobs is a part that is made.")
    top_logprobs: int | None = None
    max_tool_calls: int | None = Field(
        None, ge=1, description="Has no effect: the server has no tools of its own."
    )
    truncation: Literal["disabled"] = "disabled"
    service_tier: str | None = Field(None, description="Has no effect.")
    safety_identifier: str | None = Field(None, description="Has no effect.")
    prompt_cache_key: str | None = Field(None, description="Has no effect: prefixes are always cached.")

    refused: ClassVar[dict[str, Refusal]] = REFUSED | {"prompt": ("the server has no stored prompts", UNSET)}

    @property
    def has_logprobs(self) -> bool:
        """The text has log-probabilities."""
        return self.top_logprobs is not None or "message.output_text.logprobs" in self.include

    @property
    def keeps(self) -> bool:
        """The response may be continued and fetched later."""
        return self.store is not False

    def messages(self) -> list[Message]:
        """Return the new messages. Raises InvalidRequest for an item that cannot be part of a conversation."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[Message] = []
        for index, item in enumerate(self.input):
            _add(messages, f"input[{index}]", item)
        return messages

    def chat(self, messages: list[Message]) -> Chat:
        """Return the conversation with these messages."""
        if self.instructions is not None:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        options = dict(self.chat_template_kwargs or {})
        if (effort := (self.reasoning or {}).get("effort")) is not None:
            options.setdefault("reasoning_effort", effort)
        return Chat(
            messages,
            template_options=options,
            tools=[_tool(f"tools[{index}]", tool) for index, tool in enumerate(self.tools or ())],
            tool_choice=_tool_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls is not False,
        )

    def sampling(self) -> SamplingParams:
        """Return the settings. Raises InvalidRequest, also for a constraint that is not supported."""
        return self.sampling_params(
            self.max_output_tokens,
            _constraint((self.text or {}).get("format")),
            logprobs=(self.top_logprobs or 0) if self.has_logprobs else None,
        )


def _constraint(wanted: Any) -> StructuredOutputsParams | None:
    """Return the constraint of the text; None for any."""
    if wanted is None:
        return None
    if not isinstance(wanted, Mapping) or not isinstance(wanted.get("type"), str):
        raise InvalidRequest("text.format", "must be an object with a type")
    if wanted["type"] == "json_schema":
        return schema_constraint("text.format.schema", wanted.get("schema"))
    if wanted["type"] not in ("text", "json_object"):
        problem = f"is {wanted['type'][:64]!r}, must be text, json_object or json_schema"
        raise InvalidRequest("text.format.type", problem)
    return requested_constraint(ResponseFormat(type=wanted["type"]))


def _tool_choice(choice: str | JsonObject | None) -> str | JsonObject:
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        return choice
    if is_allowed_tools(choice):
        tools = choice.get("tools")
        if isinstance(tools, list):
            tools = [_named_function(each) if isinstance(each, dict) else each for each in tools]
        return allowed_tools(choice.get("mode"), tools)
    return _named_function(choice)


def _named_function(choice: JsonObject) -> JsonObject:
    """Return the name of a function in the form of /v1/chat/completions; without a name, the object as it is."""
    if "name" not in choice:
        return choice
    return {"type": choice.get("type", "function"), "function": {"name": choice["name"]}}


def _add(messages: list[Message], field: str, item: Mapping[str, Any]) -> None:
    """Add an item: calls and reasoning belong to the assistant's message beside them."""
    kind = item.get("type", "message")
    if kind == "message":
        _add_message(messages, field, item)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _content(f"{field}.output", item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        message: Message = {"role": "assistant"}
        if reasoning := _text(f"{field}.content", parts):
            messages.append(message | {"reasoning_content": reasoning})
    else:
        known = "message, function_call, function_call_output or reasoning"
        raise InvalidRequest(f"{field}.type", f"is {str(kind)[:100]!r}, must be {known}")


def _add_message(messages: list[Message], field: str, item: Mapping[str, Any]) -> None:
    role = item.get("role")
    content = _content(f"{field}.content", item.get("content"))
    if role == "assistant":
        message = _assistant(messages)
        if "content" not in message and "tool_calls" not in message:
            message["content"] = content
            return
    messages.append({"role": "system" if role == "developer" else role, "content": content})


def _assistant(messages: list[Message]) -> Message:
    """Return the last message if it is the assistant's, otherwise a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _content(field: str, content: Any) -> str | list[Any]:
    """Return a content as text, or as parts if some are images."""
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return _text(field, content)
    parts: list[Any] = []
    for index, part in enumerate(content):
        if _is_image(part):
            if part.get("image_url") is None:
                raise InvalidRequest(f"{field}[{index}].image_url", "must be the URL of the image")
            parts.append(part)
        else:
            parts.append({"type": "text", "text": _part_text(f"{field}[{index}]", part)})
    return parts


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "input_image"


def _text(field: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(field, "must be text or a list of parts")
    return "\n".join(_part_text(f"{field}[{index}]", part) for index, part in enumerate(content))


def _part_text(field: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in (*_TEXT_PARTS, "reasoning_text", "summary_text"):
        raise InvalidRequest(field, f"is {str(kind)[:64]!r}, must be a part with text or an input_image")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{field}.text", "must be text")
    return text


def _tool(field: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        problem = f"is {str(tool.get('type'))[:100]!r}, must be function: the server has no tools of its own"
        raise InvalidRequest(f"{field}.type", problem)
    names = "name", "description", "parameters", "strict"
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}
