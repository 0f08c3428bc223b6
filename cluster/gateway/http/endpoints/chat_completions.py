"""/v1/chat/completions: conversations in, messages out, as OpenAI's API and vLLM."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from functools import partial

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from ....text.chat_format.deltas import (
    AssistantMessage,
    ChatDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCallStart,
)
from ....text.requests.outputs import (
    CompletionDelta,
    CompletionFinished,
    CompletionOutput,
    PositionLogprobs,
    RequestOutput,
    StreamEvent,
    Usage,
)
from ...admin.services import GatewayServices
from ...generation.generation import Generation, GenerationCall
from ..calls import (
    preparing,
    renamed_fields,
    run_to_end,
    with_context,
)
from ..completion_objects import (
    Choice,
    Chunk,
    ChunkStream,
    Completion,
    Function,
    Message,
    ToolCall,
    chat_logprobs,
    ending,
    num_logprobs,
    prompt_logprobs_json,
    timings_json,
    total_usage,
    usage_json,
)
from ..errors import OPENAI_ERRORS, WHOLE_OR_STREAM, openai_error_event
from ..event_stream import EventStream
from ..json_bodies import BodyRoute, ResponseHead, TextTemplate
from ..schema.chat_completion import BatchChatCompletionRequest, ChatCompletionRequest
from ..stream_position import StreamPosition, chunks_of


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], responses=OPENAI_ERRORS, route_class=BodyRoute)

    @router.post("/v1/chat/completions", summary="Continue a conversation", responses=WHOLE_OR_STREAM)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        head = ResponseHead.new("chatcmpl-", body.request_id, request.headers)
        with preparing(services, body.field_names):
            call = with_context(body.call(body.chat(), body.sampling()), request, services)
            position = StreamPosition.of_headers(request.headers, call)
        if body.stream:
            return EventStream(
                _stream(services, call, body, head, position), openai_error_event, head.headers
            )
        (generation,), (output,) = await run_to_end(services, [call], body.field_names, request)
        make = partial(_whole, head, body, generation, output)
        return await head.response_of(make, num_values=num_logprobs(output))

    @router.post("/v1/chat/completions/batch", summary="Continue several conversations")
    async def create_chat_completions(body: BatchChatCompletionRequest, request: Request) -> Response:
        head = ResponseHead.new("chatcmpl-", "", request.headers)
        with preparing(services, body.field_names):
            sampling = body.sampling()
            calls = [with_context(body.call(chat, sampling), request, services) for chat in body.chats()]
        generations, outputs = await run_to_end(services, calls, body.field_names, request)
        make = partial(_whole_batch, head, body, generations, outputs)
        return await head.response_of(make, num_values=sum(map(num_logprobs, outputs)))

    return router


async def _stream(
    services: GatewayServices,
    call: GenerationCall,
    body: ChatCompletionRequest,
    head: ResponseHead,
    position: StreamPosition,
) -> AsyncGenerator[bytes, None]:
    with renamed_fields(body.field_names):
        async with services.generation.run(position.resumed(call)) as generation:
            stream = ChatStream(head, body, generation, position)
            async for chunk in chunks_of(generation, stream.event, position if body.resumable else None):
                yield chunk
            yield stream.end()


def _whole(
    head: ResponseHead, body: ChatCompletionRequest, generation: Generation, output: RequestOutput
) -> Completion:
    whole = Completion(
        head.id,
        "chat.completion",
        head.created,
        output.model,
        [_choice(body, generation, completion) for completion in output.outputs],
        usage_json(output.usage),
        timings_json(output.outputs[0].timings),
    )
    if output.prompt_logprobs is not None:
        whole.prompt_logprobs = prompt_logprobs_json(generation.model.tokenizer, output.prompt_logprobs)
    if body.return_token_ids and output.prompt_token_ids is not None:
        whole.prompt_token_ids = output.prompt_token_ids
    return whole


def _whole_batch(
    head: ResponseHead,
    body: ChatCompletionRequest,
    generations: list[Generation],
    outputs: list[RequestOutput],
) -> Completion:
    """Return the choices of all conversations, numbered in their order."""
    whole = _whole(head, body, generations[0], outputs[0])
    for generation, output in zip(generations[1:], outputs[1:], strict=True):
        for choice in _whole(head, body, generation, output).choices:
            choice.index = len(whole.choices)
            whole.choices.append(choice)
    whole.usage = usage_json(total_usage(output.usage for output in outputs))
    if len(outputs) > 1:  # those of the first conversation
        whole.prompt_logprobs = whole.prompt_token_ids = UNSET
    return whole


def _choice(body: ChatCompletionRequest, generation: Generation, completion: CompletionOutput) -> Choice:
    message = _message(completion.message or AssistantMessage())
    choice = Choice(completion.index, message, **ending(completion))
    _add_tokens(choice, body, generation, completion.token_ids, completion.logprobs or [])
    return choice


def _add_tokens(
    choice: Choice,
    body: ChatCompletionRequest,
    generation: Generation,
    token_ids: list[int],
    entries: Sequence[PositionLogprobs],
) -> None:
    """Add what the call asks for about the tokens of a choice, or of a part of it."""
    if body.logprobs:
        num_top = generation.request.sampling.logprobs or 0
        content = chat_logprobs(generation.model.tokenizer, token_ids, entries, num_top)
        choice.logprobs = {"content": content, "refusal": None}
    if body.return_token_ids:
        choice.token_ids = token_ids


def _message(message: AssistantMessage) -> Message:
    shown = Message("assistant", message.content, refusal=None)
    if message.content is None and not message.tool_calls:
        shown.content = ""
    if message.reasoning_content is not None:
        shown.reasoning = shown.reasoning_content = message.reasoning_content
    if message.tool_calls:
        shown.tool_calls = [
            ToolCall(id=call.id, type="function", function=Function(call.name, call.arguments))
            for call in message.tool_calls
        ]
    return shown


class ChatStream(ChunkStream):
    """Writes the events of one conversation's completions as chunks."""

    def __init__(
        self,
        head: ResponseHead,
        body: ChatCompletionRequest,
        generation: Generation,
        position: StreamPosition,
    ) -> None:
        super().__init__("chat.completion.chunk", head, body, [generation], position)
        self._body: ChatCompletionRequest = body
        self._generation = generation
        num_choices = generation.request.sampling.n
        self._is_begun = [index in position.resume_position.outputs for index in range(num_choices)]
        self._num_reasoning_tokens = position.reasoning_tokens
        self._num_cached_tokens = position.cached_tokens
        self._is_plain = not (body.logprobs or body.return_token_ids or body.has_continuous_usage)
        self._contents, self._reasonings = (
            [TextTemplate(partial(self._text_part, index, kind), places) for index in range(num_choices)]
            for kind, places in ((ContentDelta, 1), (ReasoningDelta, 2))
        )

    def event(self, event: StreamEvent) -> bytes:
        """Return the chunks of an event; empty if there is nothing to send."""
        if isinstance(event, CompletionDelta):
            if self._body.resumable:
                return self._one_chunk(event)
            begun = self._begin(event.index)
            if self._is_plain:
                return begun + b"".join([self._plain(event.index, part) for part in event.chat or ()])
            return begun + self._full(event)
        if isinstance(event, CompletionFinished):
            if self._body.resumable:
                return self._one_chunk(event)
            return self._begin(event.index) + self._finished(event, Message())
        return b""

    def _begin(self, index: int) -> bytes:
        """Return the first chunk of a choice, once."""
        if self._is_begun[index]:
            return b""
        self._is_begun[index] = True
        chunk = self._new_chunk([Choice(index, delta=Message("assistant", ""))], usage=self._null_usage)
        return self._with_prompt(chunk).event()

    def _with_prompt(self, chunk: Chunk) -> Chunk:
        if self._body.return_token_ids:
            chunk.prompt_token_ids = self._generation.request.prompt_token_ids.tolist()
        return chunk

    def _one_chunk(self, event: CompletionDelta | CompletionFinished) -> bytes:
        """Return the event as one chunk at most: the client of a resumable stream has it whole or not at all."""
        is_first = not self._is_begun[event.index]
        self._is_begun[event.index] = True
        delta = Message("assistant", "") if is_first else Message()
        if isinstance(event, CompletionFinished):
            return self._finished(event, delta)
        _add_parts(delta, event.chat or ())
        if self._is_plain and delta == Message():
            return b""
        choice = Choice(event.index, delta=delta)
        self._count(choice, event)
        chunk = self._new_chunk([choice], usage=self._usage_so_far())
        return (self._with_prompt(chunk) if is_first else chunk).event()

    def _plain(self, index: int, part: ChatDelta) -> bytes:
        if isinstance(part, ContentDelta):
            return self._contents[index].with_text(part.text)
        if isinstance(part, ReasoningDelta):
            return self._reasonings[index].with_text(part.text)
        return self._part(index, part)

    def _part(self, index: int, part: ChatDelta) -> bytes:
        return self._new_chunk([Choice(index, delta=_delta(part))], usage=self._null_usage).event()

    def _text_part(self, index: int, kind: type[ContentDelta | ReasoningDelta], text: str) -> bytes:
        return self._part(index, kind(text))

    def _full(self, event: CompletionDelta) -> bytes:
        """Return chunks with log-probabilities, token ids and usage; those of all tokens are in the first chunk."""
        deltas = [_delta(part) for part in event.chat or ()] or [Message()]
        choices = [Choice(event.index, delta=delta) for delta in deltas]
        self._count(choices[0], event)
        usage = self._usage_so_far()
        return b"".join([self._new_chunk([choice], usage=usage).event() for choice in choices])

    def _count(self, choice: Choice, event: CompletionDelta) -> None:
        """Add the tokens of an event to its choice, and to the usage."""
        self._num_tokens[event.index] += len(event.token_ids)
        _add_tokens(choice, self._body, self._generation, event.token_ids, event.logprobs)

    def _finished(self, event: CompletionFinished, delta: Message) -> bytes:
        self._num_tokens[event.index] = event.usage.completion_tokens
        self._num_reasoning_tokens += event.usage.reasoning_tokens
        self._num_cached_tokens = event.usage.cached_tokens
        choice = Choice(event.index, delta=delta, **ending(event))
        timings = timings_json(event.timings)
        return self._new_chunk([choice], timings=timings, usage=self._usage_so_far()).event()

    def _usage(self) -> Usage:
        return Usage(
            len(self._generation.request.prompt_token_ids),
            sum(self._num_tokens),
            self._num_cached_tokens,
            self._num_reasoning_tokens,
        )


def _delta(part: ChatDelta) -> Message:
    """Return what a part adds to the message."""
    delta = Message()
    _add_parts(delta, [part])
    return delta


def _add_parts(delta: Message, parts: Iterable[ChatDelta]) -> None:
    calls: dict[int, ToolCall] = {}
    for part in parts:
        if isinstance(part, ContentDelta):
            delta.content = (delta.content or "") + part.text
        elif isinstance(part, ReasoningDelta):
            delta.reasoning = delta.reasoning_content = (delta.reasoning_content or "") + part.text
        elif isinstance(part, ToolCallStart):
            calls[part.index] = ToolCall(
                index=part.index, id=part.id, type="function", function=Function(part.name)
            )
        else:
            call = calls.setdefault(part.index, ToolCall(index=part.index, function=Function()))
            call.function.arguments += part.text
    if calls:
        delta.tool_calls = list(calls.values())
