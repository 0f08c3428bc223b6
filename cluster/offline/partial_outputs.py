"""PartialOutputs: the parts of a request's output while it is generated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...proto.sampling import RequestOutputKind
from ..text.requests.outputs import (
    CompletionDelta,
    CompletionFinished,
    CompletionOutput,
    PositionLogprobs,
    PromptLogprobsDelta,
    PromptScores,
    RequestOutput,
    StreamEvent,
)
from .engine import OutputCollector


@dataclass(slots=True)
class _Completion:
    """A completion so far, or what is new of it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)


class PartialOutputs:
    """Makes the outputs of one request of its events as they come.

    A message of a chat is in the last output alone, which is that of `OutputCollector` unless parts are asked for.
    """

    def __init__(self, collector: OutputCollector, kind: RequestOutputKind) -> None:
        self._collector, self._is_delta = collector, kind is RequestOutputKind.DELTA
        self._completions = [_Completion() for _ in range(collector.request.sampling.n)]
        self._ends: dict[int, CompletionFinished] = {}
        self._prompt_scores = PromptScores()

    def add(self, events: Iterable[StreamEvent]) -> RequestOutput:
        """Return the output after these events: the tokens so far, or the new ones."""
        changed = set[int]()
        for event in events:
            if isinstance(event, CompletionDelta):
                completion = self._completions[event.index]
                completion.text += event.text
                completion.token_ids += event.token_ids
                completion.logprobs += event.logprobs
                changed.add(event.index)
            elif isinstance(event, CompletionFinished):
                self._ends[event.index] = event
                changed.add(event.index)
            elif isinstance(event, PromptLogprobsDelta):
                self._prompt_scores.add(event.logprobs)
        if self._collector.processor.is_finished and not self._is_delta:
            return self._collector.output()
        shown = sorted(changed) if self._is_delta else range(len(self._completions))
        return self._collector.partial_output([self._output(index) for index in shown], self._prompt_scores)

    def _output(self, index: int) -> CompletionOutput:
        completion, end = self._completions[index], self._ends.get(index)
        if self._is_delta:
            self._completions[index] = _Completion()
        return CompletionOutput(
            index,
            completion.text,
            list(completion.token_ids),
            None if end is None else end.finish_reason,
            None if end is None else end.stop_reason,
            logprobs=list(completion.logprobs) or None,
        )
