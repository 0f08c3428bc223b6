"""/tokenize and /detokenize, as vLLM has them: what a prompt costs, without running it."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter

from ....proto.errors import InvalidRequest
from ...gateway.services import GatewayServices
from ...requests.chat import Chat
from ...requests.request import Prompt
from ..call_context import preparing
from ..schema.error_body import OPENAI_ERRORS
from ..schema.tokenize import DetokenizeRequest, TokenizeRequest

_FIELDS = {
    "chat": "messages",
    "chat.template_options": "chat_template_kwargs",
}


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["tokens"], responses=OPENAI_ERRORS)

    @router.post("/tokenize", summary="Tokenize a text or a conversation")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        with preparing(services, _FIELDS):
            model = services.models.find(body.model or "")
            token_ids = await asyncio.to_thread(
                model.checker.token_ids, _prompt(body), add_special_tokens=body.add_special_tokens
            )
        return {
            "count": len(token_ids),
            "max_model_len": model.config.max_servable_tokens,
            "tokens": token_ids,
            "token_strs": [model.tokenizer.token_text(each) for each in token_ids]
            if body.return_token_strs
            else None,
        }

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
    if body.prompt is not None:
        return body.prompt
    return Chat(
        body.messages or (),
        continue_final_message=body.continue_final_message,
        template_options=body.chat_template_kwargs or {},
        tools=body.tools or (),
        chat_template=body.chat_template,
        add_generation_prompt=body.add_generation_prompt,
    )
