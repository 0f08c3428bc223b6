"""Bodies of /v1/messages and /v1/messages/count_tokens, and their conversation in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .....proto.errors import InvalidRequest
from .....proto.sampling import SamplingParams
from .....proto.structured_outputs import StructuredOutputsParams
from ....text.requests.chat import Chat
from ..structured_output import schema_constraint
from .bounded import Entries, JsonObject, JsonObjects, TextOrObjects
from .request_model import RequestModel

Message = dict[str, Any]


class AnthropicMessage(BaseModel):
    """A message of the conversation, whose content is text or blocks."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["user", "assistant", "system"]
    content: TextOrObjects


class CountTokensRequest(RequestModel):
    """A conversation in Anthropic's form."""

    model: str | None = None
    messages: Entries[AnthropicMessage]
    system: TextOrObjects | None = None
    tools: JsonObjects | None = None
    tool_choice: JsonObject | None = Field(None, description="Of the type auto, any, tool or none.")
    thinking: JsonObject | None = Field(
        None, description="The template's variable enable_thinking, and budget_tokens if it is enabled."
    )
    output_config: JsonObject | None = Field(None, description="Its format is a json_schema.")
    chat_template_kwargs: JsonObject | None = Field(None, description="Variables of the chat template.")

    def chat(self) -> Chat:
        """Return the conversation. Raises InvalidRequest for a block that cannot be part of it."""
        messages = (
            [] if self.system is None else [{"role": "system", "content": _text("system", self.system)}]
        )
        for index, message in enumerate(self.messages):
            messages += _messages(f"messages[{index}].content", message)
        choice = self.tool_choice or {"type": "auto"}
        return Chat(
            messages,
            template_options=self._thinking() | (self.chat_template_kwargs or {}),
            tools=[_tool(f"tools[{index}]", tool) for index, tool in enumerate(self.tools or ())],
            tool_choice=_tool_choice(choice),
            parallel_tool_calls=not choice.get("disable_parallel_tool_use"),
        )

    def _thinking(self) -> dict[str, Any]:
        """Return the variables of the template."""
        if self.thinking is None:
            return {}
        kind = self.thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise InvalidRequest(
                "thinking.type", f"is {str(kind)[:64]!r}, must be enabled, disabled or adaptive"
            )
        return {} if kind == "adaptive" else {"enable_thinking": kind == "enabled"}


class MessagesRequest(CountTokensRequest):
    """Anthropic's fields."""

    max_tokens: int
    stop_sequences: Entries[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_k: int | None = None
    top_p: float | None = None
    cache_salt: str = Field("", description="Prefixes are shared only with equal salts.")
    priority: int = Field(0, ge=-(2**31) + 1, lt=2**31, description="As in vLLM, lower runs first.")
    vllm_xargs: JsonObject | None = Field(
        None, description="Name of a custom logits processor and its arguments."
    )

    def sampling(self) -> SamplingParams:
        """Return the settings. Raises InvalidRequest for a value that is not allowed."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            structured_outputs=self._form(),
            thinking_token_budget=self._thinking_budget(),
            extra_args=self.vllm_xargs or (),
        )

    def _thinking_budget(self) -> int | None:
        """Return the most tokens of the reasoning; None for no limit. A budget counts only if thinking is enabled."""
        thinking = self.thinking or {}
        budget = thinking.get("budget_tokens")
        if thinking.get("type") != "enabled" or budget is None:
            return None
        if not isinstance(budget, int) or isinstance(budget, bool) or not 1 <= budget < self.max_tokens:
            problem = (
                f"is {str(budget)[:64]}, must be an integer from 1 and below max_tokens, {self.max_tokens}"
            )
            raise InvalidRequest("thinking.budget_tokens", problem)
        return budget

    def _form(self) -> StructuredOutputsParams | None:
        """Return the form of the text; None for any."""
        wanted = (self.output_config or {}).get("format")
        if not wanted:
            return None
        if not isinstance(wanted, Mapping) or wanted.get("type") != "json_schema":
            raise InvalidRequest("output_config.format", "must be an object of the type json_schema")
        return schema_constraint("output_config.format.schema", wanted.get("schema"))


_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _tool_choice(choice: Mapping[str, Any]) -> str | JsonObject:
    """Return the choice in OpenAI's form."""
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": _member("tool_choice", choice, "name")}}
    if kind not in _TOOL_CHOICES:
        raise InvalidRequest("tool_choice.type", f"is {str(kind)[:64]!r}, must be auto, any, tool or none")
    return _TOOL_CHOICES[kind]


def _messages(field: str, message: AnthropicMessage) -> Iterator[Message]:
    """Yield OpenAI's messages: results of tools are messages of their own there."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    parts: list[Any] = []
    rest: Message = {"role": message.role}
    for index, block in enumerate(message.content):
        where = f"{field}[{index}]"
        kind = block.get("type")
        if kind in ("text", "document", "image"):
            parts.append(_part(where, block))
        elif kind == "tool_result":
            yield {
                "role": "tool",
                "tool_call_id": _member(where, block, "tool_use_id"),
                "content": _content(f"{where}.content", block.get("content") or ""),
            }
        elif kind == "tool_use":
            rest.setdefault("tool_calls", []).append(_call(where, block))
        elif kind == "thinking":
            rest["reasoning_content"] = rest.get("reasoning_content", "") + _member(where, block, "thinking")
        elif kind != "redacted_thinking":
            known = "text, image, document, thinking, tool_use or tool_result"
            raise InvalidRequest(f"{where}.type", f"is {str(kind)[:100]!r}, must be {known}")
    if parts:
        rest["content"] = _joined(parts)
    if len(rest) > 1:
        yield rest


def _content(field: str, content: Any) -> str | list[Any]:
    """Return a content as text, or as parts if some are images."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(field, "must be text or a list of blocks of text and images")
    return _joined([_part(f"{field}[{index}]", block) for index, block in enumerate(content)])


def _joined(parts: list[Any]) -> str | list[Any]:
    """Return parts of a content as one text if no image is among them."""
    if any(part["type"] == "image" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _part(field: str, block: Any) -> dict[str, Any]:
    """Return a block of text, a document or an image as a part of a content."""
    if not isinstance(block, Mapping) or block.get("type") != "image":
        return {"type": "text", "text": _block_text(field, block)}
    source = block.get("source")
    if not isinstance(source, Mapping):
        raise InvalidRequest(f"{field}.source", "must be an object")
    kind = source.get("type")
    if kind == "url":
        return {"type": "image", "url": _member(f"{field}.source", source, "url")}
    if kind != "base64":
        raise InvalidRequest(f"{field}.source.type", f"is {str(kind)[:64]!r}, must be base64 or url")
    data = _member(f"{field}.source", source, "data")
    return {"type": "image", "url": f"data:;base64,{data}"}


def _text(field: str, content: Any) -> str:
    """Return the text of a string, or of blocks of text and documents of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(field, "must be text or a list of text blocks")
    return "\n".join(_block_text(f"{field}[{index}]", block) for index, block in enumerate(content))


def _block_text(field: str, block: Any) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "text":
        return _member(field, block, "text")
    source = block.get("source") if kind == "document" else None
    if not isinstance(source, Mapping) or source.get("type") not in ("text", "content"):
        raise InvalidRequest(
            field, "must be a block of text, an image of a user or a tool, or a document of text"
        )
    if source["type"] == "content":
        text = _text(f"{field}.source.content", source.get("content"))
    else:
        text = _member(f"{field}.source", source, "data")
    headings = [_member(field, block, name) for name in ("title", "context") if block.get(name) is not None]
    return "\n".join([*headings, text])


def _member(field: str, block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{field}.{name}", "must be text")
    return value


def _call(field: str, block: Mapping[str, Any]) -> Message:
    given = block.get("input")
    if given is not None and not isinstance(given, dict):
        raise InvalidRequest(f"{field}.input", "must be an object")
    function = {"name": _member(field, block, "name"), "arguments": json.dumps(given or {})}
    return {"id": _member(field, block, "id"), "type": "function", "function": function}


def _tool(field: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise InvalidRequest(
            f"{field}.type",
            f"is {str(tool['type'])[:100]!r}, must be custom: the server has no tools of its own",
        )
    if not isinstance(schema := tool.get("input_schema"), Mapping):
        raise InvalidRequest(f"{field}.input_schema", "must be an object: the JSON schema of the input")
    function = {"name": _member(field, tool, "name"), "parameters": schema}
    if tool.get("description") is not None:
        function["description"] = _member(field, tool, "description")
    return {"type": "function", "function": function}
