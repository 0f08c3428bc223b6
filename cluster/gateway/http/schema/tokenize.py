"""Bodies of /tokenize and /detokenize."""

from __future__ import annotations

from pydantic import Field

from .bounded import JsonObject, JsonObjects, TokenIds
from .request_model import RequestModel


class TokenizeRequest(RequestModel):
    """A text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: JsonObjects | None = None
    tools: JsonObjects | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    add_special_tokens: bool = Field(True, description="For a text; a chat template adds its own.")
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(RequestModel):
    """Token ids."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool = False
