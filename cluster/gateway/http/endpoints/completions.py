"""/v1/completions: text or token ids in, text out, as OpenAI's legacy API and vLLM."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from .....proto.errors import InvalidRequest
from ....text.requests.outputs import (
    CompletionDelta,
    CompletionFinished,
    CompletionOutput,
    PositionLogprobs,
    PromptLogprobsDelta,
    PromptScores,
    RequestOutput,
    StreamEvent,
    Usage,
)
from ...admin.services import GatewayServices
from ...generation.generation import Generation, GenerationCall
from ..calls import (
    numbered_events,
    preparing,
    renamed_fields,
    run_all,
    run_to_end,
    with_context,
)
from ..completion_objects import (
    Choice,
    ChunkStream,
    Completion,
    CompletionLogprobs,
    ending,
    join_logprobs,
    num_logprobs,
    num_of_entries,
    prompt_logprobs_json,
    timings_json,
    total_usage,
    usage_json,
)
from ..errors import OPENAI_ERRORS, WHOLE_OR_STREAM, openai_error_event
from ..event_stream import EventStream
from ..json_bodies import MAX_VALUES_IN_LOOP, BodyRoute, ResponseHead, TextTemplate, encode, in_thread
from ..schema.completion import CompletionRequest
from ..stream_position import StreamPosition, chunks_of

# field of quire.v1 |-> field of this endpoint
_FIELDS = {"sampling.beam_width": "n", "sampling.prompt_logprobs": "logprobs"}


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], responses=OPENAI_ERRORS, route_class=BodyRoute)

    @router.post("/v1/completions", summary="Continue a prompt", responses=WHOLE_OR_STREAM)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        head = ResponseHead.new("cmpl-", body.request_id, request.headers)
        with preparing(services, _FIELDS):
            calls = [with_context(call, request, services) for call in _calls(body)]
            position = StreamPosition.of_headers(request.headers, calls[0])
        if body.stream:
            return EventStream(
                _stream(services, calls, body, head, position), openai_error_event, head.headers
            )
        generations, outputs = await run_to_end(services, calls, _FIELDS, request)
        make = partial(_whole, head, body, generations, outputs)
        return await head.response_of(make, num_values=sum(map(num_logprobs, outputs)))

    return router


def _calls(body: CompletionRequest) -> Sequence[GenerationCall]:
    sampling, prompts = body.sampling(), body.prompts
    if len(prompts) > 1 and body.request_id:
        raise InvalidRequest("request_id", "identifies one prompt, must be unset with several")
    if body.resumable and body.stream and (body.echo or body.logprobs is not None):
        raise InvalidRequest(
            "resumable", "cannot be combined with echo or logprobs in a stream of completions"
        )
    return [body.call(prompt, sampling, add_special_tokens=body.add_special_tokens) for prompt in prompts]


async def _stream(
    services: GatewayServices,
    calls: Sequence[GenerationCall],
    body: CompletionRequest,
    head: ResponseHead,
    position: StreamPosition,
) -> AsyncGenerator[bytes, None]:
    with renamed_fields(_FIELDS):
        async with run_all(services.generation, [position.resumed(call) for call in calls]) as generations:
            stream = CompletionStream(head, body, generations, position)
            if body.resumable:
                async for chunk in chunks_of(generations[0], partial(stream.event, 0), position):
                    yield chunk
            else:
                async for prompt_index, event in numbered_events(generations):
                    if stream.is_large(prompt_index, event):
                        chunk = await in_thread(partial(stream.event, prompt_index, event))
                    else:
                        chunk = stream.event(prompt_index, event)
                    if chunk:
                        yield chunk
            yield stream.end()


def _whole(
    head: ResponseHead,
    body: CompletionRequest,
    generations: Sequence[Generation],
    outputs: Sequence[RequestOutput],
) -> Completion:
    choices: list[Choice] = []
    for prompt, generation, output in zip(body.prompts, generations, outputs, strict=True):
        for completion in output.outputs:
            choices.append(_choice(len(choices), body, prompt, generation, output, completion))
    usage = total_usage(output.usage for output in outputs)
    if body.scores_prompt_only:
        usage = replace(usage, completion_tokens=0)
    return Completion(
        head.id,
        "text_completion",
        head.created,
        outputs[0].model,
        choices,
        usage_json(usage),
        timings_json(outputs[0].outputs[0].timings),
    )


def _choice(
    index: int,
    body: CompletionRequest,
    prompt: str | list[int],
    generation: Generation,
    output: RequestOutput,
    completion: CompletionOutput,
) -> Choice:
    text, token_ids = completion.text, completion.token_ids
    if body.scores_prompt_only:
        text, token_ids = "", []
    choice = Choice(
        index,
        text=_echoed_text(prompt, generation) + text if body.echo else text,
        logprobs=_logprobs(body, generation, output, token_ids, completion),
        **ending(completion),
    )
    if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
        choice.prompt_logprobs = prompt_logprobs_json(generation.model.tokenizer, output.prompt_logprobs)
    if body.return_token_ids and output.prompt_token_ids is not None:
        choice.token_ids, choice.prompt_token_ids = token_ids, output.prompt_token_ids
    return choice


def _logprobs(
    body: CompletionRequest,
    generation: Generation,
    output: RequestOutput,
    token_ids: list[int],
    completion: CompletionOutput,
) -> dict[str, Any] | None:
    writer = _logprobs_writer(body, generation)
    if writer is None:
        return None
    parts = []
    if body.echo and output.prompt_logprobs is not None and output.prompt_token_ids is not None:
        parts.append(writer.of_tokens(output.prompt_token_ids, output.prompt_logprobs))
    if token_ids:
        parts.append(writer.of_tokens(token_ids, list(completion.logprobs or ())))
    return join_logprobs(parts)


def _logprobs_writer(body: CompletionRequest, generation: Generation) -> CompletionLogprobs | None:
    """Return the writer of one completion's log-probabilities; None if they are not asked for."""
    if body.logprobs is None:
        return None
    return CompletionLogprobs(generation.model.tokenizer, generation.request.sampling.logprobs or 0)


def _echoed_text(prompt: str | list[int], generation: Generation) -> str:
    """Return the prompt's text for `echo`."""
    if isinstance(prompt, str):
        return prompt
    return generation.model.tokenizer.decode(prompt, skip_special_tokens=False)


class CompletionStream(ChunkStream):
    """Writes the events of all prompts of one call as chunks."""

    def __init__(
        self,
        head: ResponseHead,
        body: CompletionRequest,
        generations: Sequence[Generation],
        position: StreamPosition,
    ) -> None:
        super().__init__("text_completion", head, body, generations, position)
        self._body: CompletionRequest = body
        self._generations = generations
        self._num_choices = generations[0].request.sampling.n
        num_choices = len(self._num_tokens)
        self._must_echo = [body.echo] * num_choices
        self._must_name_prompt = [
            body.return_token_ids and not position.resume_position.outputs
        ] * num_choices
        self._writers = [
            _logprobs_writer(body, generations[index // self._num_choices]) for index in range(num_choices)
        ]
        self._prompt_logprobs = [PromptScores() for _ in generations]
        self._usages = [
            Usage(len(each.request.prompt_token_ids), cached_tokens=position.cached_tokens)
            for each in generations
        ]
        self._is_plain = not (
            body.echo or body.return_token_ids or body.logprobs is not None or body.has_continuous_usage
        )
        self._templates = [TextTemplate(partial(self._text_chunk, index)) for index in range(num_choices)]

    def is_large(self, prompt_index: int, event: StreamEvent) -> bool:
        """Return whether the chunk of an event repeats a long prompt with its log-probabilities."""
        if isinstance(event, PromptLogprobsDelta) or not self._body.echo:
            return False
        return num_of_entries(self._prompt_logprobs[prompt_index]) > MAX_VALUES_IN_LOOP

    def event(self, prompt_index: int, event: StreamEvent) -> bytes:
        """Return the chunk of an event; empty if there is nothing to send."""
        if isinstance(event, CompletionDelta):
            index = prompt_index * self._num_choices + event.index
            if self._is_plain:
                return self._templates[index].with_text(event.text) if event.text else b""
            return self._delta(prompt_index, index, event)
        if isinstance(event, CompletionFinished):
            return self._finished(prompt_index, event)
        if isinstance(event, PromptLogprobsDelta):
            self._prompt_logprobs[prompt_index].add(event.logprobs)
        return b""

    def _text_chunk(self, index: int, text: str) -> bytes:
        return self._new_chunk([Choice(index, text=text)], usage=self._null_usage).event()

    def _delta(self, prompt_index: int, index: int, event: CompletionDelta) -> bytes:
        if self._body.scores_prompt_only:
            return b""
        echo = self._echo(prompt_index, index)
        self._num_tokens[index] += len(event.token_ids)
        choice = self._choice(index, event.text, event.token_ids, event.logprobs)
        return echo + self._new_chunk([choice], usage=self._usage_so_far()).event()

    def _echo(self, prompt_index: int, index: int) -> bytes:
        """Return the chunk with the prompt, once per choice, if it is asked for."""
        if not self._must_echo[index]:
            return b""
        self._must_echo[index] = False
        generation = self._generations[prompt_index]
        token_ids = generation.request.prompt_token_ids.tolist()
        text = _echoed_text(self._body.prompts[prompt_index], generation)
        choice = self._choice(index, text, token_ids, self._prompt_logprobs[prompt_index])
        return self._new_chunk([choice]).event(encode)

    def _choice(
        self, index: int, text: str, token_ids: list[int], entries: Sequence[PositionLogprobs | None]
    ) -> Choice:
        choice = Choice(index, text=text)
        if (writer := self._writers[index]) is not None:
            choice.logprobs = writer.of_tokens(token_ids, entries)
        if self._body.return_token_ids:
            choice.token_ids = token_ids
        if self._must_name_prompt[index]:
            self._must_name_prompt[index] = False
            prompt = self._generations[index // self._num_choices].request.prompt_token_ids
            choice.prompt_token_ids = prompt.tolist()
        return choice

    def _finished(self, prompt_index: int, event: CompletionFinished) -> bytes:
        index = prompt_index * self._num_choices + event.index
        echo = self._echo(prompt_index, index)
        self._num_tokens[index] = 0 if self._body.scores_prompt_only else event.usage.completion_tokens
        self._usages[prompt_index] = event.usage
        choice = Choice(index, text="", **ending(event))
        timings = timings_json(event.timings)
        return echo + self._new_chunk([choice], timings=timings, usage=self._usage_so_far()).event()

    def _usage(self) -> Usage:
        return replace(total_usage(self._usages), completion_tokens=sum(self._num_tokens))
