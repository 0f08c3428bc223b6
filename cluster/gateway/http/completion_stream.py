"""CompletionStream: the chunks of a streamed /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...text.requests.outputs import (
    CompletionDelta,
    CompletionFinished,
    PositionLogprobs,
    PromptLogprobsDelta,
    PromptScores,
    StreamEvent,
    Usage,
)
from ..generation.generation import Generation
from .choice_logprobs import CompletionLogprobs, num_of_entries
from .json_text import json_text, quoted
from .large_response import MAX_VALUES_IN_LOOP, encode
from .response_head import ResponseHead
from .schema.completion import CompletionRequest
from .stream_position import StreamPosition
from .usage_json import ending_json, timings_json, total_usage, usage_json

DONE = b"data: [DONE]\n\n"


def echoed_text(prompt: str | list[int], generation: Generation) -> str:
    """Return the prompt's text for `echo`."""
    if isinstance(prompt, str):
        return prompt
    return generation.model.tokenizer.decode(prompt, skip_special_tokens=False)


class CompletionStream:
    """Writes the events of all prompts of one call as chunks.

    Chunks are put together from prepared text around the new text: encoding each as an object takes three times as
    long.

    Args:
        position: of the client before the events; that of several prompts is the beginning.
    """

    def __init__(
        self,
        head: ResponseHead,
        body: CompletionRequest,
        generations: Sequence[Generation],
        position: StreamPosition,
    ) -> None:
        self._body = body
        self._generations = generations
        model = generations[0].model_name
        self._start = (
            f'data: {{"id":{quoted(head.id)},"object":"text_completion","created":{head.created},'
            f'"model":{quoted(model)},'
        )
        self._num_choices = generations[0].request.sampling.n
        self._choices = [
            _Choice(self._start, index, body, generations[index // self._num_choices])
            for index in range(self._num_choices * len(generations))
        ]
        self._prompt_logprobs = [PromptScores() for _ in generations]
        for index, output in position.resume_position.outputs.items():
            self._choices[index].num_tokens = output.num_tokens
        num_tokens = sum(choice.num_tokens for choice in self._choices)
        self._usages = [
            Usage(len(each.request.prompt_token_ids), num_tokens, position.cached_tokens)
            for each in generations
        ]
        self._null_usage = ',"usage":null' if body.includes_usage else ""
        self._is_plain = not (
            body.echo or body.return_token_ids or body.logprobs is not None or body.has_continuous_usage
        )
        self._plain_end = f',"logprobs":null,"finish_reason":null}}]{self._null_usage}}}\n\n'

    def is_large(self, prompt_index: int, event: StreamEvent) -> bool:
        """Return whether the chunk of an event repeats a long prompt with its log-probabilities."""
        if isinstance(event, PromptLogprobsDelta) or not self._body.echo:
            return False
        return num_of_entries(self._prompt_logprobs[prompt_index]) > MAX_VALUES_IN_LOOP

    def event(self, prompt_index: int, event: StreamEvent) -> bytes:
        """Return the chunk of an event; empty if there is nothing to send."""
        if isinstance(event, CompletionDelta):
            choice = self._choices[prompt_index * self._num_choices + event.index]
            if self._is_plain:
                if not event.text:
                    return b""
                return (choice.start + quoted(event.text) + self._plain_end).encode()
            return self._delta(prompt_index, choice, event)
        if isinstance(event, CompletionFinished):
            return self._finished(prompt_index, event)
        if isinstance(event, PromptLogprobsDelta):
            self._prompt_logprobs[prompt_index].add(event.logprobs)
        return b""

    def end(self) -> bytes:
        """Return the chunks after all events."""
        if not self._body.includes_usage:
            return DONE
        usage = json_text(usage_json(total_usage(self._usages)))
        return f'{self._start}"choices":[],"usage":{usage}}}\n\n'.encode() + DONE

    def _delta(self, prompt_index: int, choice: _Choice, event: CompletionDelta) -> bytes:
        if self._body.scores_prompt_only:
            return b""
        echo = self._echo(prompt_index, choice)
        if self._body.has_continuous_usage:
            usage = self._usages[prompt_index]
            num_tokens = usage.completion_tokens + len(event.token_ids)
            self._usages[prompt_index] = replace(usage, completion_tokens=num_tokens)
        return echo + choice.delta(event, self._usage_member())

    def _echo(self, prompt_index: int, choice: _Choice) -> bytes:
        """Return the chunk with the prompt, once per choice, if it is asked for."""
        if not choice.must_echo:
            return b""
        return choice.echo(self._body.prompts[prompt_index], self._prompt_logprobs[prompt_index])

    def _finished(self, prompt_index: int, event: CompletionFinished) -> bytes:
        choice = self._choices[prompt_index * self._num_choices + event.index]
        echo = self._echo(prompt_index, choice)
        num_tokens = 0 if self._body.scores_prompt_only else event.usage.completion_tokens
        choice.num_tokens = num_tokens
        first = prompt_index * self._num_choices
        counted = sum(each.num_tokens for each in self._choices[first : first + self._num_choices])
        self._usages[prompt_index] = replace(event.usage, completion_tokens=counted)
        return echo + choice.finished(event, self._usage_member())

    def _usage_member(self) -> str:
        if self._body.has_continuous_usage:
            return f',"usage":{json_text(usage_json(total_usage(self._usages)))}'
        return self._null_usage


class _Choice:
    """One choice of the stream.

    Attributes:
        start: text of each chunk up to the new text.
        num_tokens: tokens so far.
        must_echo: the prompt is still to be sent.
    """

    def __init__(self, start: str, index: int, body: CompletionRequest, generation: Generation) -> None:
        self.start = f'{start}"choices":[{{"index":{index},"text":'
        self.num_tokens = 0
        self._body = body
        self._generation = generation
        self.must_echo = body.echo
        self._logprobs = (
            None
            if body.logprobs is None
            else CompletionLogprobs(generation.model.tokenizer, generation.request.sampling.logprobs or 0)
        )

    def echo(self, prompt: str | list[int], logprobs: Sequence[PositionLogprobs | None]) -> bytes:
        """Return the chunk with the prompt."""
        self.must_echo = False
        token_ids = self._generation.request.prompt_token_ids.tolist()
        return self._chunk(
            echoed_text(prompt, self._generation),
            token_ids,
            logprobs,
            "",
            self._of_prompt(token_ids, logprobs),
        )

    def delta(self, event: CompletionDelta, usage: str) -> bytes:
        self.num_tokens += len(event.token_ids)
        return self._chunk(event.text, event.token_ids, list(event.logprobs), usage)

    def finished(self, event: CompletionFinished, usage: str) -> bytes:
        stop = json_text(ending_json(event))
        timings = json_text(timings_json(event.timings))
        text = f'{self.start}"","logprobs":null,{stop[1:-1]}}}],"timings":{timings}{usage}}}\n\n'
        return text.encode()

    def _of_prompt(self, token_ids: list[int], logprobs: Sequence[PositionLogprobs | None]) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        return {"prompt_token_ids": token_ids}

    def _chunk(
        self,
        text: str,
        token_ids: list[int],
        entries: Sequence[PositionLogprobs | None],
        usage: str,
        others: dict[str, Any] | None = None,
    ) -> bytes:
        logprobs = (
            "null"
            if self._logprobs is None
            else encode(self._logprobs.of_tokens(token_ids, entries)).decode()
        )
        members = f'"logprobs":{logprobs},"finish_reason":null'
        if others:
            members += f",{json_text(others)[1:-1]}"
        if self._body.return_token_ids:
            members += f',"token_ids":[{",".join(map(str, token_ids))}]'
        return f"{self.start}{quoted(text)},{members}}}]{usage}}}\n\n".encode()
