"""Pooled requests of an LLM: embeddings, classes and scores of pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...proto.errors import InvalidRequest
from ...proto.pooling import PoolingParams
from ...proto.sampling import SamplingParams
from ..text.requests.outputs import Usage
from ..text.requests.pooling import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PooledResult,
    PoolingOutput,
    PoolingRequestOutput,
    ScorePrompts,
    ScoringOutput,
    ScoringRequestOutput,
    collect_pooled,
    cosine_similarity,
)
from ..text.requests.request import AnyPrompt, Request, RequestChecker
from ..text.requests.tokenizer import Tokenizer
from .engine import Engine, OutputCollector

Advance = Callable[[], None]


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """A prompt with its settings."""

    prompt: AnyPrompt
    params: PoolingParams
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""


class PooledRequests:
    """Runs pooled requests on an engine."""

    def __init__(self, engine: Engine, checker: RequestChecker, tokenizer: Tokenizer) -> None:
        self._engine, self._checker, self._tokenizer = engine, checker, tokenizer
        self._score_prompts = ScorePrompts(engine.config, tokenizer)

    def embed(self, prompts: Sequence[PooledPrompt], advance: Advance) -> list[EmbeddingRequestOutput]:
        """Return an embedding of each prompt."""
        self._require("embed", classifies=False)
        return [
            EmbeddingRequestOutput(
                request.request_id,
                request.prompt_token_ids.tolist(),
                EmbeddingOutput(result.values.tolist()),
                usage=result.usage,
            )
            for request, result in self._run(prompts, advance)
        ]

    def encode(
        self, prompts: Sequence[PooledPrompt], task: str | None, advance: Advance
    ) -> list[PoolingRequestOutput]:
        """Return the vector of each prompt as a tensor.

        Args:
            task: embed or classify; None for what the model does.
        """
        if task not in (None, "embed", "classify"):
            problem = f"is {task!r}, must be embed or classify: vectors are those of whole prompts"
            raise InvalidRequest("pooling_task", problem)
        if task is not None:
            self._require(task, classifies=task == "classify")
        from ...worker import as_tensor  # torch, which an LLM on several ranks does without

        return [
            PoolingRequestOutput(
                request.request_id,
                request.prompt_token_ids.tolist(),
                PoolingOutput(as_tensor(result.values)),
                usage=result.usage,
            )
            for request, result in self._run(prompts, advance)
        ]

    def classify(
        self, prompts: Sequence[PooledPrompt], advance: Advance
    ) -> list[ClassificationRequestOutput]:
        """Return the classes' scores of each prompt."""
        self._require("classify", classifies=True)
        pooling = self._engine.config.model.pooling
        assert pooling is not None
        return [
            ClassificationRequestOutput(
                request.request_id,
                request.prompt_token_ids.tolist(),
                ClassificationOutput(result.values.tolist(), pooling.labels),
                usage=result.usage,
            )
            for request, result in self._run(prompts, advance)
        ]

    def score(
        self, queries: Sequence[str], documents: Sequence[str], params: PoolingParams, advance: Advance
    ) -> list[ScoringRequestOutput]:
        """Return the score of each document for its query; of one query for all documents if there is only one."""
        if len(queries) not in (1, len(documents)):
            raise InvalidRequest(
                "data_1", f"has {len(queries)} texts for {len(documents)}, must have 1 or as many"
            )
        repeated = [queries[0]] * len(documents) if len(queries) == 1 else queries
        pairs = list(zip(repeated, documents, strict=True))
        pooling = self._engine.config.model.pooling
        if pooling is not None and pooling.classifies:
            if len(pooling.labels) != 1:
                raise InvalidRequest(
                    "model", f"has {len(pooling.labels)} classes, must have 1 to score pairs"
                )
            prompts = [
                PooledPrompt(self._score_prompts.prompt(query, document), params) for query, document in pairs
            ]
            return [
                _scored(
                    request.request_id,
                    request.prompt_token_ids.tolist(),
                    float(result.values[0]),
                    result.usage,
                )
                for request, result in self._run(prompts, advance)
            ]
        return self._similarities(queries, documents, params, advance)

    def _similarities(
        self, queries: Sequence[str], documents: Sequence[str], params: PoolingParams, advance: Advance
    ) -> list[ScoringRequestOutput]:
        """Return the cosine similarities of embeddings; each text is embedded once."""
        texts = [PooledPrompt(text, params) for text in (*queries, *documents)]
        results = self._run(texts, advance)
        outputs = []
        for index, (request, document) in enumerate(results[len(queries) :]):
            own, query = results[index if len(queries) > 1 else 0]
            usage = Usage(
                query.usage.prompt_tokens + document.usage.prompt_tokens,
                cached_tokens=query.usage.cached_tokens + document.usage.cached_tokens,
            )
            token_ids = np.concatenate([own.prompt_token_ids, request.prompt_token_ids]).tolist()
            score = cosine_similarity(query.values, document.values)
            outputs.append(_scored(request.request_id, token_ids, score, usage))
        return outputs

    def _require(self, call: str, *, classifies: bool) -> None:
        pooling, name = self._engine.config.model.pooling, self._engine.config.model.name
        if pooling is not None and pooling.classifies != classifies:
            does = "classifies" if pooling.classifies else "embeds"
            raise InvalidRequest("model", f"{name} {does} prompts; {call} is not for it")

    def _run(self, prompts: Sequence[PooledPrompt], advance: Advance) -> list[tuple[Request, PooledResult]]:
        """Run all prompts; raise InvalidRequest for one that cannot be served, before any is started."""
        requests = [
            self._checker.check(
                each.prompt,
                SamplingParams(),
                priority=each.priority,
                tenant=each.tenant,
                cache_salt=each.cache_salt,
                pooling=each.params,
            )
            for each in prompts
        ]
        name = self._engine.config.model.name
        collectors = [OutputCollector(None, request, name, self._tokenizer) for request in requests]
        self._engine.run(collectors, advance)
        return [
            (request, collect_pooled(collector.events))
            for request, collector in zip(requests, collectors, strict=True)
        ]


def _scored(request_id: str, token_ids: list[int], score: float, usage: Usage) -> ScoringRequestOutput:
    return ScoringRequestOutput(request_id, token_ids, ScoringOutput(score), usage=usage)
