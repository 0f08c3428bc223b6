"""Pooled requests: the prompts of rerankers, and outputs, whose names and fields are vLLM's with `usage` added."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....proto.codec import FloatArray
from ....proto.config import EngineConfig
from .chat import Chat
from .outputs import CompletionFinished, PooledVector, StreamEvent, Usage
from .request import AnyPrompt, TextPair
from .tokenizer import Tokenizer

# A template for rerankers names the roles of a query and a document.
_ROLES = (re.compile(r"""["']query["']"""), re.compile(r"""["']document["']"""))


@dataclass(frozen=True, slots=True, eq=False)
class PooledResult:
    """The vector of one prompt."""

    values: FloatArray
    usage: Usage


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """An embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of dimensions."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """Scores of all classes, probabilities unless `use_activation` is off.

    Attributes:
        labels: names of the classes.
    """

    probs: list[float]
    labels: tuple[str, ...] = ()

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """Score of a pair of texts."""

    score: float


@dataclass(frozen=True, slots=True, eq=False)
class PoolingOutput:
    """The vector of `LLM.encode` and `LLM.reward`.

    Attributes:
        data: a tensor of torch, [dimensions or classes] float32.
    """

    data: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and bool((self.data == other.data).all())

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput:
    """Output of a pooled request, and the fields of all outputs below.

    Attributes:
        prompt_token_ids: the tokens that were pooled.
        outputs: a PoolingOutput, or in the classes below what they name.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: Any
    usage: Usage = field(default_factory=Usage, compare=False, kw_only=True)

    @property
    def finished(self) -> bool:
        """True: outputs are returned when they are complete."""
        return True

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was found in the prefix cache."""
        return self.usage.cached_tokens


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput(PoolingRequestOutput):
    """Embedding of a prompt."""

    outputs: EmbeddingOutput


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput(PoolingRequestOutput):
    """Classification of a prompt."""

    outputs: ClassificationOutput


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput(PoolingRequestOutput):
    """Score of a pair of texts. With an embedding model the tokens of both follow each other."""

    outputs: ScoringOutput


def collect_pooled(events: Iterable[StreamEvent]) -> PooledResult:
    """Return the result that the events of a pooled request contain."""
    values: FloatArray | None = None
    usage = Usage()
    for event in events:
        if isinstance(event, PooledVector):
            values = event.values
        elif isinstance(event, CompletionFinished):
            usage = event.usage
    assert values is not None, "the stream has no vector"
    return PooledResult(values, usage)


def cosine_similarity(left: FloatArray, right: FloatArray) -> float:
    """Return the cosine of the angle between two vectors; 0 if one of them is 0."""
    norm = float(np.linalg.norm(left) * np.linalg.norm(right))
    return float(np.dot(left, right)) / norm if norm else 0.0


class ScorePrompts:
    """Makes the prompts of pairs for one model."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        template = config.chat.chat_template or tokenizer.chat_template() or ""
        self._has_roles = all(role.search(template) for role in _ROLES)

    def prompt(self, query: str, document: str, instruction: str | None = None) -> AnyPrompt:
        """Return the prompt of a pair.

        Args:
            instruction: a system message, if the model has a template for rerankers; ignored otherwise.
        """
        if not self._has_roles:
            return TextPair(query, document)
        roles = {"system": instruction, "query": query, "document": document}
        return Chat([{"role": role, "content": text} for role, text in roles.items() if text is not None])
