"""Pooled calls of all servers: several prompts together, and scores of pairs of texts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ....proto.errors import InvalidRequest
from ...text.requests.outputs import Usage
from ...text.requests.pooling import PooledResult, ScorePrompts, collect_pooled, cosine_similarity
from ...text.requests.request import Request
from ..routing.served_models import ServedModel
from .generation import GenerationCall, GenerationService

# Prompts or pairs of one call, as OpenAI allows.
MAX_INPUTS = 2048
# Requests of one call that run or wait at once: enough to fill steps, and one call cannot fill the queue.
_MAX_RUNNING = 128


@dataclass(frozen=True, slots=True)
class PooledResponse:
    """The vector of one prompt."""

    model: ServedModel
    request: Request
    result: PooledResult


@dataclass(frozen=True, slots=True)
class PairScore:
    """Score of a pair of texts."""

    score: float
    usage: Usage


def check_num_inputs(field: str, count: int) -> None:
    """Raise InvalidRequest for no prompts, and for too many."""
    if not 1 <= count <= MAX_INPUTS:
        raise InvalidRequest(field, f"has {count} entries, must have 1 to {MAX_INPUTS}")


async def pool_all(service: GenerationService, calls: Sequence[GenerationCall]) -> list[PooledResponse]:
    """Return the vectors of all calls, in their order. On every exit their sequences have ended.

    Raises:
        QuireError: the first error of a call; all others were aborted.
    """
    may_run = asyncio.Semaphore(_MAX_RUNNING)

    async def pool(call: GenerationCall) -> PooledResponse:
        async with may_run, service.run(call) as generation:
            events = [event async for event in generation.events]
        return PooledResponse(generation.model, generation.request, collect_pooled(events))

    tasks = []
    try:
        for call in calls:
            tasks.append(asyncio.create_task(pool(call)))
            await asyncio.sleep(0)  # checking one takes 0.2 ms, and other streams must not wait for all
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(BaseException):
                await task


async def score_pairs(
    service: GenerationService,
    model: ServedModel,
    base: GenerationCall,
    queries: Sequence[str],
    documents: Sequence[str],
    instruction: str | None = None,
) -> list[PairScore]:
    """Return the score of each document for its query, or for the only query.

    A model with one class reads both texts together; with an embedding model the score is the cosine of their
    embeddings, and each text is embedded once.

    Args:
        base: the call, with any prompt.

    Raises:
        InvalidRequest: the model has several classes, or the numbers of texts differ.
    """
    if len(queries) not in (1, len(documents)):
        raise InvalidRequest(
            "queries", f"has {len(queries)} texts for {len(documents)}, must have 1 or as many"
        )
    pooling = model.config.model.pooling
    if pooling is None or not pooling.classifies:
        return await _similarities(service, base, queries, documents)
    if len(pooling.labels) != 1:
        raise InvalidRequest(
            "model", f"{model.name} has {len(pooling.labels)} classes, must have 1 to score pairs"
        )
    prompts = ScorePrompts(model.config, model.tokenizer)
    repeated = [queries[0]] * len(documents) if len(queries) == 1 else queries
    calls = [
        replace(base, prompt=prompts.prompt(query, document, instruction))
        for query, document in zip(repeated, documents, strict=True)
    ]
    responses = await pool_all(service, calls)
    return [PairScore(float(each.result.values[0]), each.result.usage) for each in responses]


async def _similarities(
    service: GenerationService, base: GenerationCall, queries: Sequence[str], documents: Sequence[str]
) -> list[PairScore]:
    responses = await pool_all(service, [replace(base, prompt=text) for text in (*queries, *documents)])
    results = [response.result for response in responses]
    scores = []
    for index, document in enumerate(results[len(queries) :]):
        query = results[index if len(queries) > 1 else 0]
        is_counted = len(queries) > 1 or index == 0
        usage = document.usage
        if is_counted:
            usage = Usage(
                query.usage.prompt_tokens + usage.prompt_tokens,
                cached_tokens=query.usage.cached_tokens + usage.cached_tokens,
            )
        scores.append(PairScore(cosine_similarity(query.values, document.values), usage))
    return scores
