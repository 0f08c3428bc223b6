"""Bodies of errors, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class OpenAIErrorDetails(BaseModel):
    """The member `error` of OpenAI's form.

    Attributes:
        code: quire's reason in lower case.
        param: field of the request.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorBody(BaseModel):
    """An error in OpenAI's form."""

    error: OpenAIErrorDetails


class AnthropicErrorDetails(BaseModel):
    """The member `error` of Anthropic's form."""

    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: AnthropicErrorDetails


Responses = dict[int | str, dict[str, Any]]

# Responses of endpoints that speak OpenAI's or Anthropic's protocol, beside those that succeed.
OPENAI_ERRORS: Responses = {
    "4XX": {"model": OpenAIErrorBody, "description": "The call is refused."},
    "5XX": {"model": OpenAIErrorBody, "description": "The server cannot serve the call now."},
}
ANTHROPIC_ERRORS: Responses = {
    "4XX": {"model": AnthropicErrorBody, "description": "The call is refused."},
    "5XX": {"model": AnthropicErrorBody, "description": "The server cannot serve the call now."},
}
# The response of an endpoint that streams if it is asked to.
WHOLE_OR_STREAM: Responses = {
    200: {
        "description": "The whole response, or a stream of events.",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}
