"""Engine: runs the requests of one LLM call. OutputCollector: the output of one of these requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from ...proto.config import EngineConfig
from ...proto.engine_command import EngineCommand
from ..text.requests.output_processor import OutputProcessor
from ..text.requests.outputs import RequestOutput, RequestStarted, StreamEvent, collect_output
from ..text.requests.request import Request
from ..text.requests.sequence_update import SequenceUpdate
from ..text.requests.tokenizer import Tokenizer


class OutputCollector:
    """Collects the output of one request.

    Args:
        prompt: the prompt's text, for the output; None without one.
        model: name of the model, for the output.

    Attributes:
        processor: turns updates into events.
        events: the events so far.
    """

    def __init__(self, prompt: str | None, request: Request, model: str, tokenizer: Tokenizer) -> None:
        self._prompt = prompt
        self._arrival_time = time.time()
        self.request = request
        self.processor = OutputProcessor(request, tokenizer, decode_logprobs=True)
        self.events: list[StreamEvent] = [
            RequestStarted(request.request_id, model, len(request.prompt_token_ids))
        ]

    @property
    def finds_stops(self) -> bool:
        """Return whether the output may end at a stop string: then each token is processed as it comes."""
        return bool(self.request.sampling.stop)

    def on_update(self, index: int, update: SequenceUpdate) -> None:
        """Add an update of output `index`. Raises the QuireError that ended the request."""
        self.events += self.processor.process(index, update)

    def output(self) -> RequestOutput:
        """Return the output of the request, which must have ended."""
        assert self.processor.is_finished, "the request still runs"
        output = collect_output(
            self.events,
            prompt=self._prompt,
            prompt_token_ids=self.request.prompt_token_ids.tolist(),
            with_prompt_logprobs=self.request.sampling.prompt_logprobs is not None,
            arrival_time=self._arrival_time,
        )
        scores = output.prompt_logprobs
        return output if scores is None else replace(output, prompt_logprobs=list(scores))


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

    def control(self, command: EngineCommand) -> None:
        """Carry out a command.

        Raises:
            InvalidRequest: it cannot be carried out; nothing has changed.
        """
        ...

    def close(self) -> None:
        """Free the model. Safe to call twice."""
        ...
