"""ChatEncoder: conversations to token ids, the parsers of their completions and the constraints of their replies."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ....proto.block_tables import IntArray
from ....proto.errors import InvalidRequest
from ....proto.options.sections import ChatOptions
from ....proto.structured_outputs import StructuredOutputsParams
from ..chat_format.chat_format import ChatFormat, OpenReasoning
from ..chat_format.output_parser import ChatOutputParser
from ..chat_format.tool_structures import FunctionSchema, ToolStructure
from .chat import Chat
from .chat_template import TemplateError, prepare_rendering
from .prompt_images import WITHOUT_IMAGES, Images
from .tokenizer import PromptEncoder, Tokenizer

# What is wrong with a request that asks for a constraint too.
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


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A tokenized prompt.

    Attributes:
        constraint: applies to the output after the reasoning; None for any output.
        reasoning: reasoning that the prompt leaves the model in, or that may begin next; None if there is none.
        new_parser: returns a parser for one completion of a conversation.
        needs_special_tokens: the parser finds special tokens in the text, which must not be left out.
        can_reason: the prompt is a conversation, and the format of the model's reasoning is known.
    """

    token_ids: IntArray
    constraint: StructuredOutputsParams | None
    reasoning: OpenReasoning | None
    new_parser: Callable[[], ChatOutputParser] | None = None
    needs_special_tokens: bool = False
    can_reason: bool = False


class ChatEncoder:
    """Renders and tokenizes the conversations of one model. Threads may share one.

    Args:
        reads_images: the model reads images, so that its template may read contents as lists of parts.
    """

    def __init__(
        self,
        config: ChatOptions,
        tokenizer: Tokenizer,
        prompt_encoder: PromptEncoder,
        reads_images: bool = False,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._prompt_encoder = prompt_encoder
        self._reads_images = reads_images

    def encode(
        self, chat: Chat, constraint: StructuredOutputsParams | None = None, images: Images = WITHOUT_IMAGES
    ) -> EncodedPrompt:
        """Return the prompt of a conversation, rendered by the chat template with its special tokens.

        Args:
            constraint: constraint that the request asks for.
            images: the images of the conversation.

        Raises:
            InvalidRequest: the conversation is invalid, there is no template, or the template rejects it.
        """
        chat.check()
        source = self._template(chat)
        chat_format = self._format(chat, source)
        try:
            token_ids, end = self._render(chat, source, images)
        except TemplateError as error:
            raise InvalidRequest("chat", f"the model's template rejects it: {error}") from error
        tools = chat.parameters_by_tool
        structure = None if chat_format.tool_calls is None else chat_format.tool_calls.structure
        return EncodedPrompt(
            token_ids,
            tool_constraint(chat, structure, constraint) or constraint,
            chat_format.open_reasoning(end),
            lambda: chat_format.parser(end, tools, allows_parallel_calls=chat.allows_parallel_calls),
            any(marker in self._tokenizer.special_tokens for marker in chat_format.markers),
            chat_format.reasoning is not None,
        )

    def format_without_chat(self) -> ChatFormat:
        """Return the formats of the completions of texts and token ids, as the model's own template shows them."""
        source = self._config.chat_template or self._tokenizer.chat_template()
        return ChatFormat.find("none", self._config.reasoning_parser, source)

    def _render(self, chat: Chat, source: str, images: Images) -> tuple[IntArray, str]:
        """Return the token ids and the end of the prompt. Raises TemplateError."""
        prepare = partial(
            prepare_rendering,
            chat,
            source,
            self._tokenizer.named_special_tokens,
            reads_images=self._reads_images,
            expansions=images.expansions,
        )
        try:
            return self._prompt_encoder.encode_chat(prepare())
        except TemplateError as error:
            if not chat.has_tool_calls:
                raise
            # Most templates write the arguments of earlier calls as JSON. Those of DeepSeek append them as text.
            try:
                return self._prompt_encoder.encode_chat(prepare(arguments_as_text=True))
            except TemplateError:
                raise error from None

    def _template(self, chat: Chat) -> str:
        source = self._config.chat_template
        if chat.chat_template is not None:
            if not self._config.trust_request_chat_template:
                raise InvalidRequest(
                    "chat.chat_template", "is not permitted: the server needs --trust-request-chat-template"
                )
            source = chat.chat_template
        if source is None:
            source = self._tokenizer.chat_template(for_tools=chat.offers_tools)
        if source is None:
            raise InvalidRequest(
                "chat", "is not supported: the model has no chat template; send text or token ids"
            )
        return source

    def _format(self, chat: Chat, template: str) -> ChatFormat:
        config = self._config
        found = ChatFormat.find(config.tool_call_parser, config.reasoning_parser, template)
        if not chat.offers_tools:
            return found.without_tool_calls()
        if found.tool_calls is None and config.tool_call_parser != "none":
            raise InvalidRequest(
                "chat.tools",
                "are not supported: the chat template does not show the format of tool calls; "
                "the server needs --tool-call-parser",
            )
        return found


def tool_constraint(
    chat: Chat, structure: ToolStructure | None, constraint: StructuredOutputsParams | None
) -> StructuredOutputsParams | None:
    """Return the constraint of the reply; None if tool_choice and the functions ask for none.

    Args:
        structure: structure of the model's tool calls; None if it is not known.
        constraint: constraint that the request itself asks for.

    Raises:
        InvalidRequest: the model's format of tool calls cannot be forced, or the request asks for a constraint too.
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
    if constraint is not None:
        raise InvalidRequest(field, _CONFLICTS["required" if is_required else field])
    known = _structure(field, structure)
    called = list(map(_function, functions))
    if is_required:
        tag = known.calls(called, allows_parallel_calls=chat.allows_parallel_calls)
    elif known.trigger:
        tag = known.calls_in_text(called, allows_parallel_calls=chat.allows_parallel_calls)
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
