"""/v1/embeddings, as OpenAI's API and vLLM, and /classify and /pooling, as vLLM."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from .....proto.codec import FloatArray
from .....proto.errors import InvalidRequest
from ...admin.services import GatewayServices
from ...generation.pooled_calls import PooledResponse, pool_all
from ..calls import preparing, renamed_fields, unless_client_leaves, with_context
from ..completion_objects import total_usage, usage_json
from ..errors import OPENAI_ERRORS
from ..json_bodies import BodyRoute, ResponseHead
from ..schema.pooling import (
    ClassifyRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    PoolingRequest,
    PromptsBody,
)

# field of quire.v1 |-> field of this endpoint
FIELDS = {
    "prompt": "input",
    "pooling.dimensions": "dimensions",
    "pooling.truncate_prompt_tokens": "truncate_prompt_tokens",
}
_COHERE_FIELDS = {
    "prompt": "texts",
    "input": "texts",
    "pooling.dimensions": "output_dimension",
    "pooling.truncate_prompt_tokens": "max_tokens",
}


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], responses=OPENAI_ERRORS, route_class=BodyRoute)

    @router.post("/v1/embeddings", summary="Embed prompts")
    async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
        head = ResponseHead.new("embd-", body.request_id)
        with preparing(services, FIELDS):
            _require(services, body.model, classifies=False)
        return await _vectors(services, body, request, head, "embedding", "embedding")

    @router.post("/v2/embed", summary="Embed texts, as Cohere's API")
    async def embed(body: CohereEmbedRequest, request: Request) -> Response:
        head = ResponseHead.new("embd-", "", request.headers)
        with preparing(services, _COHERE_FIELDS):
            _require(services, body.model, classifies=False)
            prompts = body.as_embedding()
        answers = await _pool(services, prompts, request, prompts.dimensions, _COHERE_FIELDS)
        vectors = [answer.result.values for answer in answers]

        def whole() -> dict[str, Any]:
            types = dict.fromkeys(body.embedding_types or ["float"])
            return {
                "id": head.id,
                "embeddings": {kind: [_ENCODERS[kind](each) for each in vectors] for kind in types},
                "texts": body.texts,
                "meta": {
                    "api_version": {"version": "2"},
                    "billed_units": {
                        "input_tokens": sum(answer.result.usage.prompt_tokens for answer in answers)
                    },
                },
                "response_type": "embeddings_by_type",
            }

        return await head.response_of(whole, num_values=sum(each.size + 1 for each in vectors))

    @router.post("/pooling", summary="Return the vectors of an embedder or the scores of a classifier")
    async def pool(body: PoolingRequest, request: Request) -> Response:
        head = ResponseHead.new("pool-", body.request_id)
        if body.task is not None:
            with preparing(services, FIELDS):
                _require(services, body.model, classifies=body.task == "classify")
        return await _vectors(services, body, request, head, "pooling", "data")

    @router.post("/classify", summary="Return the scores of a classifier's classes")
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        head = ResponseHead.new("classify-", body.request_id)
        with preparing(services, FIELDS):
            _require(services, body.model, classifies=True)
        responses = await _pool(services, body, request)

        def entries() -> list[dict[str, Any]]:
            return [{"index": index, **_classes(response)} for index, response in enumerate(responses)]

        return await _list_response(head, responses, entries)

    return router


async def _vectors(
    services: GatewayServices,
    body: EmbeddingRequest,
    request: Request,
    head: ResponseHead,
    kind: str,
    member: str,
) -> Response:
    """Return the vectors of all prompts, each as a `member` of an object of this kind."""
    answers = await _pool(services, body, request, body.dimensions)
    encode = _ENCODERS[body.encoding_format]

    def entries() -> list[dict[str, Any]]:
        return [
            {"index": index, "object": kind, member: encode(answer.result.values)}
            for index, answer in enumerate(answers)
        ]

    return await _list_response(head, answers, entries)


async def _pool(
    services: GatewayServices,
    body: PromptsBody,
    request: Request,
    dimensions: int | None = None,
    fields: Mapping[str, str] = FIELDS,
) -> list[PooledResponse]:
    with preparing(services, fields):
        pooling = body.pooling(dimensions)
        calls = [with_context(body.call(prompt, pooling), request, services) for prompt in body.prompts]
    async with unless_client_leaves(request.receive):
        with renamed_fields(fields):
            return await pool_all(services.generation, calls)


def _require(services: GatewayServices, name: str | None, *, classifies: bool) -> None:
    """Raise InvalidRequest if the model does the other of embedding and classifying."""
    model = services.models.find(name or "")
    pooling = model.config.model.pooling
    if pooling is not None and pooling.classifies != classifies:
        own, other = ("classifies", "embeds") if pooling.classifies else ("embeds", "classifies")
        raise InvalidRequest(
            "model", f"{model.name} {own} prompts; this endpoint is for a model that {other} them"
        )


def _base64(values: FloatArray) -> str:
    """Return the numbers as little-endian float32 in base64, as OpenAI's clients read them."""
    return base64.b64encode(np.ascontiguousarray(values, dtype="<f4").tobytes()).decode()


def _bits(values: FloatArray) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return whether each number is positive, eight in a byte."""
    return np.packbits(values > 0)


_ENCODERS: dict[str, Callable[[FloatArray], str | list[float]]] = {
    "float": lambda values: values.tolist(),
    "base64": _base64,
    "ubinary": lambda values: _bits(values).tolist(),
    "binary": lambda values: (_bits(values).astype(np.int16) - 128).tolist(),
}


def _classes(response: PooledResponse) -> dict[str, Any]:
    pooling = response.model.config.model.pooling
    assert pooling is not None, "the request was pooled"
    scores = response.result.values.tolist()
    label = pooling.labels[int(np.argmax(response.result.values))]
    return {"label": label, "probs": scores, "num_classes": len(scores)}


async def _list_response(
    head: ResponseHead, responses: Sequence[PooledResponse], entries: Callable[[], list[dict[str, Any]]]
) -> Response:
    def body() -> dict[str, Any]:
        return {
            "id": head.id,
            "object": "list",
            "created": head.created,
            "model": responses[0].model.name,
            "data": entries(),
            "usage": usage_json(total_usage(response.result.usage for response in responses)),
        }

    num_values = sum(response.result.values.size + 1 for response in responses)
    return await head.response_of(body, num_values=num_values)
