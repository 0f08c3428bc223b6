"""/v1/completions: text or token ids in, text out, as OpenAI's legacy API and vLLM."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from .....proto.errors import InvalidRequest
from ....text.requests.outputs import CompletionOutput, RequestOutput
from ...admin.services import GatewayServices
from ...generation.generation import Generation, GenerationCall
from ..calls import (
    collect_all,
    numbered_events,
    preparing,
    renamed_fields,
    run_all,
    unless_client_leaves,
    with_context,
)
from ..choice_logprobs import CompletionLogprobs, join_logprobs, num_logprobs, prompt_logprobs_json
from ..completion_stream import CompletionStream, echoed_text
from ..errors import OPENAI_ERRORS, WHOLE_OR_STREAM, openai_error_event
from ..event_stream import EventStream
from ..large_request import BodyRoute
from ..large_response import in_thread, response_of
from ..response_head import ResponseHead
from ..schema.completion import CompletionRequest
from ..stream_position import StreamPosition, chunks_of
from ..usage_json import ending_json, timings_json, total_usage, usage_json

# field of quire.v1 |-> field of this endpoint
_FIELDS = {"sampling.beam_width": "n", "sampling.prompt_logprobs": "logprobs"}


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], responses=OPENAI_ERRORS, route_class=BodyRoute)

    @router.post("/v1/completions", summary="Continue a prompt", responses=WHOLE_OR_STREAM)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        head = ResponseHead.new("cmpl-", body.request_id)
        with preparing(services, _FIELDS):
            calls = [with_context(call, request, services) for call in _calls(body)]
            position = StreamPosition.of_headers(request.headers, calls[0])
        if body.stream:
            return EventStream(
                _stream(services, calls, body, head, position), openai_error_event, head.headers
            )
        async with unless_client_leaves(request.receive):
            with renamed_fields(_FIELDS):
                async with run_all(services.generation, calls) as generations:
                    outputs = await collect_all(generations)
        make = partial(_whole, head, body, generations, outputs)
        return await response_of(head, make, num_values=sum(map(num_logprobs, outputs)))

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
) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for prompt, generation, output in zip(body.prompts, generations, outputs, strict=True):
        for completion in output.outputs:
            choice = _choice(body, prompt, generation, output, completion)
            choices.append({"index": len(choices), **choice})
    usage = usage_json(total_usage(output.usage for output in outputs))
    if body.scores_prompt_only:
        usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
    return {
        "id": head.id,
        "object": "text_completion",
        "created": head.created,
        "model": outputs[0].model,
        "choices": choices,
        "usage": usage,
        "timings": timings_json(outputs[0].outputs[0].timings),
    }


def _choice(
    body: CompletionRequest,
    prompt: str | list[int],
    generation: Generation,
    output: RequestOutput,
    completion: CompletionOutput,
) -> dict[str, Any]:
    text, token_ids = completion.text, completion.token_ids
    if body.scores_prompt_only:
        text, token_ids = "", []
    choice: dict[str, Any] = {
        "text": echoed_text(prompt, generation) + text if body.echo else text,
        "logprobs": _logprobs(body, generation, output, token_ids, completion),
        **ending_json(completion),
    }
    if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprobs_json(generation.model.tokenizer, output.prompt_logprobs)
    if body.return_token_ids:
        choice |= {"token_ids": token_ids, "prompt_token_ids": output.prompt_token_ids}
    return choice


def _logprobs(
    body: CompletionRequest,
    generation: Generation,
    output: RequestOutput,
    token_ids: list[int],
    completion: CompletionOutput,
) -> dict[str, Any] | None:
    if body.logprobs is None:
        return None
    writer = CompletionLogprobs(generation.model.tokenizer, generation.request.sampling.logprobs or 0)
    parts = []
    if body.echo and output.prompt_logprobs is not None and output.prompt_token_ids is not None:
        parts.append(writer.of_tokens(output.prompt_token_ids, output.prompt_logprobs))
    if token_ids:
        parts.append(writer.of_tokens(token_ids, list(completion.logprobs or ())))
    return join_logprobs(parts)
