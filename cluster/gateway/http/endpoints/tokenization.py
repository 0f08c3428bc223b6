"""/tokenize and /detokenize, as vLLM has them, and /apply-template, as llama.cpp: prompts that are not run."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from pydantic import Field

from .....proto.errors import InvalidRequest
from .....proto.sampling import SamplingParams
from ....text.requests.request import Prompt
from ...admin.services import GatewayServices
from ...generation.generation import GenerationCall
from ..calls import preparing, prompt_token_ids, with_context
from ..errors import OPENAI_ERRORS
from ..json_bodies import MAX_VALUES_IN_LOOP, BodyRoute, encode, in_thread
from ..schema.bounded import JsonObjects, TokenIds
from ..schema.conversation import ConversationFields
from ..schema.request_model import RequestModel

_FIELDS = {
    "chat": "messages",
    "chat.template_options": "chat_template_kwargs",
}


class ModelBody(ConversationFields):
    """A conversation, if it has messages, and the model that reads it."""

    model: str | None = None


class ApplyTemplateRequest(ModelBody):
    """A conversation."""

    messages: JsonObjects


class TokenizeRequest(ModelBody):
    """A text, or a conversation."""

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

    async def tokens_of(
        prompt: Prompt, body: ModelBody, request: Request, *, add_special_tokens: bool = True
    ) -> list[int]:
        call = GenerationCall(
            prompt, SamplingParams(), model=body.model or "", add_special_tokens=add_special_tokens
        )
        return await prompt_token_ids(services, with_context(call, request, services))

    @router.post("/apply-template", summary="Return the prompt of a conversation as text")
    async def apply_template(body: ApplyTemplateRequest, request: Request) -> dict[str, str]:
        with preparing(services, _FIELDS):
            model = services.models.find(body.model or "")
            token_ids = await tokens_of(body.chat(), body, request)
        text = await asyncio.to_thread(model.tokenizer.decode, token_ids, skip_special_tokens=False)
        return {"prompt": text}

    @router.post("/tokenize", summary="Tokenize a text or a conversation")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        with preparing(services, _FIELDS):
            model = services.models.find(body.model or "")
            prompt = _prompt(body)
            token_ids = await tokens_of(prompt, body, request, add_special_tokens=body.add_special_tokens)

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

    @router.get("/tokenizer_info", summary="Describe the tokenizer")
    async def tokenizer_info(model: str = "") -> Response:
        with preparing(services, {}):
            served = services.models.find(model)
        tokenizer = served.tokenizer
        added = tokenizer.added_tokens()
        info = {
            "tokenizer_class": type(tokenizer.transformers_tokenizer).__name__,
            "vocab_size": served.config.model.vocab_size,
            "model_max_length": served.config.max_servable_tokens,
            **tokenizer.named_special_tokens,
            "added_tokens_decoder": {
                str(token_id): {"content": text, "special": token_id in tokenizer.special_ids}
                for text, token_id in added.items()
            },
            "chat_template": served.config.chat.chat_template or tokenizer.chat_template(),
        }
        return Response(
            await in_thread(lambda: encode(info)) if len(added) > MAX_VALUES_IN_LOOP else encode(info),
            media_type="application/json",
        )

    return router


def _prompt(body: TokenizeRequest) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt", "must be given, or messages, and not both")
    return body.chat() if body.prompt is None else body.prompt
