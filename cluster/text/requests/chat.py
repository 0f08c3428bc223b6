"""Chat: a conversation, which the model's chat template renders to a prompt."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ....proto.errors import InvalidRequest
from ..media.image_source import ImageSource
from .chat_messages import (
    ContentForm,
    Message,
    check_function,
    check_message,
    message_images,
    message_texts,
    template_message,
)
from .json_values import check_count, check_json, check_mapping, check_text, show_value

MAX_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_DOCUMENTS = 1024
MAX_CHAT_CHARS = 4 << 20  # of the texts of a conversation together

Tool = Mapping[str, Any]

# Variables of a template that quire sets, and arguments of transformers that templates do not see.
_RESERVED_OPTIONS = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations",
        "documents", "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict",
        "return_tensors", "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip

_MODES = ("none", "auto", "required")
_ALLOWED = "allowed_tools"
_ALLOWED_MODES = ("auto", "required")
_MAX_ALLOWED = 1024


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, and the functions that the model may call.

    Args:
        messages: oldest first, in the form of OpenAI's API; the roles are usually ``system``, ``user``,
            ``assistant`` and ``tool``. Content is text, a list of parts of text and images, or None beside tool
            calls.
        continue_final_message: continue the last message, which must be the assistant's, instead of a new one.
        template_options: further variables of the template by name, for example ``enable_thinking``.
        tools: functions that the model may call, ``{"type": "function", "function": {"name": ...}}`` each.
        tool_choice: ``auto``; ``none`` for a reply without tool calls, whose prompt has no tools; ``required`` for a
            reply of at least one tool call; ``{"type": "function", "function": {"name": ...}}`` for calls of one
            function; or ``{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}`` for ``auto`` or
            ``required`` with calls of some functions only, each named as above. The prompt has all tools then.
        parallel_tool_calls: allow several tool calls in one reply.
        documents: for templates of models that answer from documents.
        chat_template: a template for this conversation instead of the model's, if the server permits it.
        add_generation_prompt: end the prompt with the beginning of the assistant's message.
        image_settings: settings of the model's image processor for this conversation, for example ``max_pixels``.
    """

    messages: Sequence[Message]
    continue_final_message: bool = False
    template_options: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Tool] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    documents: Sequence[Mapping[str, Any]] = ()
    chat_template: str | None = None
    add_generation_prompt: bool = True
    image_settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def may_have_images(self) -> bool:
        """A message has another part than text. Also of a conversation that is not checked."""
        messages = self.messages if isinstance(self.messages, list | tuple) else ()
        contents = (message.get("content") for message in messages if isinstance(message, Mapping))
        return any(
            isinstance(part, Mapping) and part.get("type", "text") != "text"
            for content in contents
            if isinstance(content, list | tuple)
            for part in content
        )

    @property
    def images(self) -> list[tuple[str, ImageSource]]:
        """The images of a checked conversation, each with the name of its place."""
        return [
            image
            for index, message in enumerate(self.messages)
            for image in message_images(f"chat.messages[{index}]", message)
        ]

    def with_images(self, images: Mapping[str, ImageSource]) -> Chat:
        """Return the conversation with other images, by the names of their places."""
        messages = []
        for index, message in enumerate(self.messages):
            content = message.get("content")
            if content is not None and not isinstance(content, str):
                places = (f"chat.messages[{index}].content[{part}]" for part in range(len(content)))
                parts = [
                    {"type": "image", "image": images[place]} if place in images else part
                    for place, part in zip(places, content, strict=True)
                ]
                message = {**message, "content": parts}
            messages.append(message)
        return replace(self, messages=messages)

    @property
    def offers_tools(self) -> bool:
        """The model may call functions."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def choice(self) -> ToolChoice:
        """The functions that the reply may or must call; call it on a checked conversation."""
        return ToolChoice.of(self.tool_choice)

    @property
    def allows_parallel_calls(self) -> bool:
        """The reply may have several calls. A choice that names a function asks for one."""
        names_function = not isinstance(self.tool_choice, str) and not is_allowed_tools(self.tool_choice)
        return self.parallel_tool_calls and not names_function

    @property
    def may_constrain(self) -> bool:
        """The reply may have a constraint, which has to be compiled. Also of a conversation that is not checked."""
        return bool(self.tools) and (
            self.tool_choice not in ("auto", "none") or any(map(_is_strict, self.tools))
        )

    @property
    def has_tool_calls(self) -> bool:
        """A message has tool calls."""
        return any(message.get("tool_calls") for message in self.messages)

    @property
    def parameters_by_tool(self) -> dict[str, Mapping[str, Any]]:
        """name |-> JSON schema of the parameters, of the functions that the prompt offers."""
        functions = (tool["function"] for tool in self.tools if self.offers_tools)
        return {function["name"]: function.get("parameters") or {} for function in functions}

    def check(self) -> None:
        """Raises InvalidRequest, which names the member, if this is not a valid conversation."""
        check_count("chat.messages", self.messages, 1, MAX_MESSAGES)
        for index, message in enumerate(self.messages):
            check_message(f"chat.messages[{index}]", message)
        self._check_total()
        self._check_tools()
        check_count("chat.documents", self.documents, 0, MAX_DOCUMENTS)
        for index, document in enumerate(self.documents):
            check_mapping(f"chat.documents[{index}]", document)
        check_json("chat.documents", self.documents)
        check_mapping("chat.image_settings", self.image_settings)
        check_json("chat.image_settings", self.image_settings)
        self._check_template()

    def template_messages(
        self, form: ContentForm, *, arguments_as_text: bool = False
    ) -> list[dict[str, Any]]:
        """Return the messages as templates read them.

        Args:
            form: the form that the messages' contents get.
            arguments_as_text: give the arguments of tool calls as JSON text instead of an object.
        """
        return [
            template_message(message, form=form, arguments_as_text=arguments_as_text)
            for message in self.messages
        ]

    def _check_total(self) -> None:
        num_chars = sum(len(text) for message in self.messages for text in message_texts(message))
        if num_chars > MAX_CHAT_CHARS:
            raise InvalidRequest("chat.messages", f"have {num_chars} characters, at most {MAX_CHAT_CHARS}")

    def _check_tools(self) -> None:
        check_count("chat.tools", self.tools, 0, MAX_TOOLS)
        check_json("chat.tools", self.tools)
        for index, tool in enumerate(self.tools):
            _check_tool(f"chat.tools[{index}]", tool)
        check_tool_choice("chat.tool_choice", self.tool_choice, self.parameters_by_tool)

    def _check_template(self) -> None:
        check_mapping("chat.template_options", self.template_options)
        for name, value in self.template_options.items():
            if name in _RESERVED_OPTIONS:
                raise InvalidRequest(f"chat.template_options[{name!r}]", "is reserved, must not be set")
            check_json(f"chat.template_options[{show_value(name)}]", value)
        check_json("chat.template_options", self.template_options)
        if self.chat_template is not None:
            check_text("chat.chat_template", self.chat_template, MAX_CHAT_CHARS)


def _is_strict(tool: object) -> bool:
    """Return whether a tool, which may not have been checked yet, is a strict function."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and bool(function.get("strict"))


def _check_tool(field: str, tool: object) -> None:
    function = check_function(field, check_mapping(field, tool))
    if function.get("parameters") is not None:
        check_mapping(f"{field}.function.parameters", function["parameters"])


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
