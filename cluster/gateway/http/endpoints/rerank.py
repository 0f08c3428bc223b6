"""/score, as vLLM has it, and /rerank, as Cohere, Jina and vLLM have it: how well texts go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from ...admin.services import GatewayServices
from ...generation.pooled_calls import PairScore, score_pairs
from ..calls import preparing, renamed_fields, unless_client_leaves, with_context
from ..completion_objects import total_usage, usage_json
from ..errors import OPENAI_ERRORS
from ..json_bodies import BodyRoute, ResponseHead
from ..schema.pooling import PoolingFields, RerankRequest, ScoreRequest

_FIELDS = {"prompt": "documents", "pooling.truncate_prompt_tokens": "truncate_prompt_tokens"}


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["reranking"], responses=OPENAI_ERRORS, route_class=BodyRoute)

    @router.post("/score", summary="Score pairs of texts")
    @router.post("/v1/score", summary="Score pairs of texts")
    async def score(body: ScoreRequest, request: Request) -> Response:
        head = ResponseHead.new("score-", body.request_id)
        with preparing(services, _FIELDS):
            queries, documents = body.pairs
        name, scores = await _score(services, body, request, queries, documents, body.instruction)
        data = [{"index": index, "object": "score", "score": each.score} for index, each in enumerate(scores)]
        top = {"id": head.id, "object": "list", "created": head.created, "model": name}
        return head.response({**top, "data": data, "usage": _usage(scores)})

    @router.post("/rerank", summary="Rank documents by how well they answer a query")
    @router.post("/v1/rerank", summary="Rank documents by how well they answer a query")
    @router.post("/v2/rerank", summary="Rank documents by how well they answer a query")
    async def rerank(body: RerankRequest, request: Request) -> Response:
        head = ResponseHead.new("rerank-", body.request_id)
        with preparing(services, _FIELDS):
            texts = body.texts
        name, scores = await _score(services, body, request, [body.query], texts, body.instruction)
        results = _ranked(body, texts, scores)
        return head.response({"id": head.id, "model": name, "usage": _usage(scores), "results": results})

    return router


async def _score(
    services: GatewayServices,
    body: PoolingFields,
    request: Request,
    queries: Sequence[str],
    documents: Sequence[str],
    instruction: str | None,
) -> tuple[str, list[PairScore]]:
    """Return the model's name, and the score of each document."""
    with preparing(services, _FIELDS):
        model = services.models.find(body.model or "")
        base = with_context(body.call("", body.pooling()), request, services)
    async with unless_client_leaves(request.receive):
        with renamed_fields(_FIELDS):
            scores = await score_pairs(services.generation, model, base, queries, documents, instruction)
    return model.name, scores


def _ranked(body: RerankRequest, texts: list[str], scores: list[PairScore]) -> list[dict[str, Any]]:
    order = sorted(range(len(scores)), key=lambda index: -scores[index].score)
    results = []
    for index in order[: body.top_n or None]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index].score}
        if body.return_documents:
            result["document"] = {"text": texts[index]}
        results.append(result)
    return results


def _usage(scores: Sequence[PairScore]) -> dict[str, Any]:
    return usage_json(total_usage(each.usage for each in scores))
