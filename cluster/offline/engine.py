"""Engine: runs the requests of one LLM call. OutputCollector: the output of one of these requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ...proto.config import EngineConfig
from ...proto.engine_command import EngineCommand
from ...proto.replica_status import ReplicaStatus
from ..text.requests.output_processor import OutputProcessor
from ..text.requests.outputs import (
    CompletionOutput,
    PositionLogprobs,
    RequestOutput,
    RequestStarted,
    StreamEvent,
    collect_output,
)
from ..text.requests.request import Request
from ..text.requests.sequence_update import SequenceUpdate
from ..text.requests.tokenizer import Tokenizer
from .flat_logprobs import FlatLogprobs
from .prompts import LoRARequest

if TYPE_CHECKING:
    from ..fleet.replica.client import ReplicaClient  # ZeroMQ


class OutputCollector:
    """Collects the output of one request.

    Args:
        prompt: the prompt's text, for the output; None without one.
        model: name of the model, for the output.
        lora_request: the adapter that made the output.
        flat_logprobs: the output has a FlatLogprobs instead of lists.

    Attributes:
        processor: turns updates into events.
        events: the events so far.
    """

    def __init__(
        self,
        prompt: str | None,
        request: Request,
        model: str,
        tokenizer: Tokenizer,
        *,
        lora_request: LoRARequest | None = None,
        flat_logprobs: bool = False,
    ) -> None:
        self._prompt, self._model = prompt, model
        self._lora_request, self._has_flat_logprobs = lora_request, flat_logprobs
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
        return self._in_form(output)

    def partial_output(
        self, completions: list[CompletionOutput], prompt_scores: Sequence[PositionLogprobs | None]
    ) -> RequestOutput:
        """Return an output with these completions, before the request has ended."""
        request = self.request
        has_scores = request.sampling.prompt_logprobs is not None
        return self._in_form(
            RequestOutput(
                request.request_id,
                self._model,
                self._prompt,
                request.prompt_token_ids.tolist(),
                completions,
                prompt_scores if has_scores else None,
                self._arrival_time,
                finished=self.processor.is_finished,
            )
        )

    def _in_form(self, output: RequestOutput) -> RequestOutput:
        """Return an output with its adapter, and its log-probabilities in lists or as was asked for."""
        form = FlatLogprobs.of if self._has_flat_logprobs else list
        scores = output.prompt_logprobs
        return replace(
            output,
            lora_request=self._lora_request,
            prompt_logprobs=None if scores is None else form(scores),
            outputs=[_with_flat_logprobs(each) for each in output.outputs]
            if self._has_flat_logprobs
            else output.outputs,
        )


def _with_flat_logprobs(completion: CompletionOutput) -> CompletionOutput:
    scores = completion.logprobs
    return completion if scores is None else replace(completion, logprobs=FlatLogprobs.of(scores))


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

    def flush_cache(self) -> None:
        """Forget the cached prefixes."""
        ...

    def status(self) -> ReplicaStatus:
        """Return the state in numbers."""
        ...

    def connect(self) -> AbstractAsyncContextManager[ReplicaClient]:
        """Return a client for requests one by one, open within the block. No other call may run meanwhile."""
        ...

    def close(self) -> None:
        """Free the model. Safe to call twice."""
        ...
