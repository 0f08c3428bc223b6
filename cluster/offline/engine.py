"""Engine: runs the requests of one LLM call. OutputCollector: the output of one of these requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ...proto.config import EngineConfig
from ..requests.output_processor import Answers, Piece
from ..requests.outputs import Output, collect
from ..requests.request import Request
from ..requests.sequence_update import SequenceUpdate
from ..requests.tokenizer import Tokenizer


class OutputCollector:
    """Collects the output of one request."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self.answers = Answers(request, tokenizer)
        self.pieces: list[Piece] = []

    @property
    def outputs(self) -> tuple[Output, ...]:
        assert self.answers.is_over, "the request still runs"
        return collect(self.pieces)

    def on_update(self, index: int, update: SequenceUpdate) -> None:
        """Add an update of output `index`. Raises the QuireError that ended the request."""
        self.pieces += self.answers.take(index, update)


class Engine(Protocol):
    """A loaded model and the scheduler that runs requests on it.

    Attributes:
        config: configuration with the number of KV blocks resolved.
    """

    config: EngineConfig

    def run(self, collectors: list[OutputCollector], advance: Callable[[], None]) -> None:
        """Run every collector's request to its end; call `advance` at the end of each.

        Raises:
            QuireError: one of the requests failed. The others were aborted.
        """
        ...

    def close(self) -> None:
        """Free the model. Safe to call twice."""
        ...
