"""/inference/v1/generate, as vLLM: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from .....proto.errors import InvalidRequest
from .....proto.sampling import SamplingParams
from ....text.requests.outputs import CompletionOutput, PositionLogprobs, most_likely
from ...admin.services import GatewayServices
from ...generation.generation import GenerationCall
from ..calls import collect_all, preparing, renamed_fields, unless_client_leaves, with_context
from ..completion_objects import json_logprob, num_logprobs, prompt_logprobs_json, usage_json, version_json
from ..errors import OPENAI_ERRORS
from ..json_bodies import BodyRoute, ResponseHead
from ..schema.bounded import JsonObject, TokenIds
from ..schema.peer_fields import REFUSED, UNSET
from ..schema.request_model import RequestModel

_NAMES = frozenset(field.name for field in fields(SamplingParams))
_FIELDS = {"prompt": "token_ids"} | {f"sampling.{name}": f"sampling_params.{name}" for name in _NAMES}


class GenerateRequest(RequestModel):
    """The fields of vLLM."""

    token_ids: TokenIds
    sampling_params: JsonObject = Field(description="Fields of SamplingParams by name.")
    model: str | None = None
    stream: bool = False
    request_id: str = ""
    priority: int = Field(0, ge=-(2**31) + 1, lt=2**31, description="As in vLLM, lower runs first.")
    cache_salt: str = Field("", description="Prefixes are shared only with equal salts.")

    refused = REFUSED | {"features": ("the model reads text only", UNSET)}

    def sampling(self) -> SamplingParams:
        """Return the settings, of which only stop strings need text. Raises InvalidRequest if one is wrong."""
        given = {name: value for name, value in self.sampling_params.items() if not name.startswith("_")}
        unknown = next((name for name in given if name not in _NAMES), None)
        if unknown is not None:
            raise InvalidRequest(f"sampling_params.{unknown[:64]}", "is no setting")
        max_tokens = given.pop("max_tokens", 16)
        return SamplingParams.from_optional(
            max_tokens=max_tokens, **given | {"detokenize": bool(given.get("stop"))}
        )


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["tokens"], responses=OPENAI_ERRORS, route_class=BodyRoute)

    @router.post("/inference/v1/generate", summary="Continue token ids by token ids")
    async def generate(body: GenerateRequest, request: Request) -> Response:
        head = ResponseHead.new("gen-", body.request_id, request.headers)
        with preparing(services, _FIELDS):
            if body.stream:
                raise InvalidRequest("stream", "is true, must be false; /v1/completions streams token ids")
            call = GenerationCall(
                body.token_ids,
                body.sampling(),
                model=body.model or "",
                priority=-body.priority,  # in quire.v1, higher runs first
                cache_salt=body.cache_salt,
                request_id=body.request_id,
            )
            call = with_context(call, request, services)
        async with unless_client_leaves(request.receive):
            with renamed_fields(_FIELDS):
                async with services.generation.run(call) as generation:
                    (output,) = await collect_all([generation])
        num_top = generation.request.sampling.logprobs or 0

        def whole() -> dict[str, Any]:
            scores = output.prompt_logprobs
            return {
                "request_id": output.request_id,
                "model": output.model,
                "choices": [_choice(completion, num_top) for completion in output.outputs],
                "prompt_logprobs": None
                if scores is None
                else prompt_logprobs_json(generation.model.tokenizer, scores),
                "usage": usage_json(output.usage),
            }

        return await head.response_of(whole, num_values=num_logprobs(output))

    return router


def _choice(completion: CompletionOutput, num_top: int) -> dict[str, Any]:
    scores = completion.logprobs
    return {
        "index": completion.index,
        "token_ids": completion.token_ids,
        "logprobs": None if scores is None else {"content": _contents(completion.token_ids, scores, num_top)},
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        **version_json(completion),
    }


def _contents(token_ids: list[int], scores: Sequence[PositionLogprobs], num_top: int) -> list[dict[str, Any]]:
    """Return the entries of ``logprobs.content``, in which a token's text is its id."""
    return [
        {
            **_entry(token_id, entry[token_id].logprob),
            "top_logprobs": [_entry(top_id, top.logprob) for top_id, top in most_likely(entry, num_top)],
        }
        for token_id, entry in zip(token_ids, scores, strict=True)
    ]


def _entry(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "logprob": json_logprob(logprob), "bytes": None}
