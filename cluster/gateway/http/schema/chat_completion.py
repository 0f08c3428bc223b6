"""Body of /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from .....proto.errors import InvalidRequest
from .....proto.sampling import SamplingParams
from ....text.requests.chat import Chat
from .bounded import Bounded, JsonObjects
from .completion import MAX_PROMPTS
from .conversation import ConversationFields
from .sampling_fields import SamplingFields


class ChatCompletionRequest(SamplingFields, ConversationFields):
    """OpenAI's fields, and vLLM's beside them."""

    messages: JsonObjects = Field(
        description="Oldest first; roles and parts that the model's template knows."
    )

    max_completion_tokens: int | None = Field(None, description="By default, the rest of the context.")
    max_tokens: int | None = Field(None, description="The older name of max_completion_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def sampling(self) -> SamplingParams:
        """Return the settings. Raises InvalidRequest, also for a form that is not supported."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs to be true")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling_params(max_tokens, logprobs=(self.top_logprobs or 0) if self.logprobs else None)

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


class BatchChatCompletionRequest(ChatCompletionRequest):
    """Several conversations with the same settings, as in vLLM."""

    messages: Annotated[list[JsonObjects], Bounded(MAX_PROMPTS)] = Field(  # type: ignore[assignment]
        min_length=1, description="Conversations; the choices of all follow each other."
    )

    def chats(self) -> list[Chat]:
        """Return the conversations. Raises InvalidRequest for what only one conversation can have."""
        if self.stream:
            raise InvalidRequest("stream", "is true, must be false for several conversations")
        if self.request_id:
            raise InvalidRequest("request_id", "identifies one conversation, must be unset with several")
        one = self.chat()
        return [replace(one, messages=messages) for messages in self.messages]
