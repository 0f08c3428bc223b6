"""/tokenize and /detokenize, as vLLM has them: what a prompt costs, without running it."""

from __future__ import annotations

import asyncio
from functools import partial

from fastapi import APIRouter, Request, Response
from pydantic import Field

from .....proto.errors import InvalidRequest
from ....text.requests.request import Prompt
from ...admin.services import GatewayServices
from ..calls import preparing
from ..errors import OPENAI_ERRORS
from ..json_bodies import MAX_VALUES_IN_LOOP, BodyRoute, encode, in_thread
from ..schema.bounded import TokenIds
from ..schema.conversation import ConversationFields
from ..schema.request_model import RequestModel

_FIELDS = {
    "chat": "messages",
    "chat.template_options": "chat_template_kwargs",
}


class TokenizeRequest(ConversationFields):
    """A text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = Field(True, description="For a text; a chat template adds its own.")
    return_token_strs: bool = False


class DetokenizeRequest(RequestModel):
    """Token ids."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool = False


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["tokens"], responses=OPENAI_ERRORS, route_class=BodyRoute)

    @router.post("/tokenize", summary="Tokenize a text or a conversation")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        with preparing(services, _FIELDS):
            model = services.models.find(body.model or "")
            tenant = services.authenticator.tenant(request.state.caller, "")
            check = partial(
                model.checker.token_ids, _prompt(body), add_special_tokens=body.add_special_tokens
            )
            token_ids = await services.generation.prompt_concurrency.run(tenant, check)

        def content() -> bytes:
            texts = map(model.tokenizer.token_text, token_ids) if body.return_token_strs else None
            return encode(
                {
                    "count": len(token_ids),
                    "max_model_len": model.config.max_servable_tokens,
                    "tokens": token_ids,
                    "token_strs": None if texts is None else list(texts),
                }
            )

        is_large = len(token_ids) > MAX_VALUES_IN_LOOP
        return Response(await in_thread(content) if is_large else content(), media_type="application/json")

    @router.post("/detokenize", summary="Return the text of token ids")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        with preparing(services, {"prompt": "tokens"}):
            model = services.models.find(body.model or "")
            model.checker.check_token_ids("prompt", body.tokens)
        text = await asyncio.to_thread(
            model.tokenizer.decode, body.tokens, skip_special_tokens=body.skip_special_tokens
        )
        return {"prompt": text}

    return router


def _prompt(body: TokenizeRequest) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt", "must be given, or messages, and not both")
    return body.chat() if body.prompt is None else body.prompt
