"""Body of /v1/chat/completions."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from .....proto.errors import InvalidRequest
from .....proto.sampling import SamplingParams
from ....text.requests.chat import Chat
from ..structured_output import GUIDED_FIELDS
from .bounded import JsonObject, JsonObjects, TextOrObject
from .sampling_fields import SamplingFields


class ChatFields(SamplingFields):
    """A conversation and how the template renders it."""

    messages: JsonObjects = Field(
        description="Oldest first; roles and parts that the model's template knows."
    )
    tools: JsonObjects | None = None
    tool_choice: TextOrObject | None = Field(
        None, description="none, auto, required, a function or allowed_tools."
    )
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, description="A variable of the chat template.")
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = Field(None, description="Variables of the chat template.")
    documents: JsonObjects | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def chat(self) -> Chat:
        """Return the conversation, which the service checks."""
        options = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            options.setdefault("reasoning_effort", self.reasoning_effort)
        return Chat(
            self.messages,
            continue_final_message=self.continue_final_message,
            template_options=options,
            tools=self.tools or (),
            tool_choice="auto" if self.tool_choice is None else self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            documents=self.documents or (),
            chat_template=self.chat_template,
            add_generation_prompt=self.add_generation_prompt,
        )


class ChatCompletionRequest(ChatFields):
    """OpenAI's fields, and vLLM's beside them."""

    max_completion_tokens: int | None = Field(None, description="By default, the rest of the context.")
    max_tokens: int | None = Field(None, description="The older name of max_completion_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = None

    refused: ClassVar[dict[str, str]] = GUIDED_FIELDS | {
        "functions": "use tools",
        "function_call": "use tool_choice",
        "audio": "the model writes text only",
        "web_search_options": "the server reads nothing from the web",
    }

    def sampling(self) -> SamplingParams:
        """Return the settings. Raises InvalidRequest, also for a form that is not supported."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs to be true")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        params = self.sampling_params(
            max_tokens=max_tokens, logprobs=(self.top_logprobs or 0) if self.logprobs else None
        )
        if max_tokens is None:
            params.max_tokens = None
        return params

    @property
    def field_names(self) -> dict[str, str]:
        """Return field of quire.v1 |-> field of this endpoint."""
        max_tokens = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {
            "sampling.max_tokens": max_tokens,
            "sampling.logprobs": "top_logprobs",
            "sampling.beam_width": "n",
            "prompt": "messages",
            "chat": "messages",
            "chat.template_options": "chat_template_kwargs",
        }
