"""/infill, as llama.cpp: text between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from .....proto.errors import InvalidRequest
from .....proto.sampling import SamplingParams
from ....text.requests.infill import InfillTokens
from ....text.requests.outputs import CompletionDelta, CompletionFinished, CompletionOutput, Usage
from ...admin.services import GatewayServices
from ...generation.generation import Generation, GenerationCall
from ..calls import (
    preparing,
    prompt_token_ids,
    renamed_fields,
    run_to_end,
    with_context,
)
from ..completion_objects import timings_json
from ..errors import OPENAI_ERRORS, WHOLE_OR_STREAM, openai_error_event
from ..event_stream import EventStream
from ..json_bodies import BodyRoute, ResponseHead, json_bytes
from ..schema.bounded import Entries
from ..schema.sampling_fields import OutputFields

_FIELDS = {"prompt": "input_prefix", "sampling.max_tokens": "n_predict"}
_MAX_FILES = 64


class OtherFile(BaseModel):
    """A file of the same repository."""

    filename: str = "tmp"
    text: str


class InfillRequest(OutputFields):
    """llama.cpp's fields, and those of completions."""

    input_prefix: str = Field(description="The text before what is filled in.")
    input_suffix: str = Field(description="The text after it.")
    input_extra: Entries[OtherFile] = Field(default_factory=list, description="Other files, for context.")
    prompt: str = Field("", description="The beginning of what is filled in.")
    n_predict: int = Field(-1, ge=-1, description="Most tokens; -1 for the rest of the context.")

    def sampling_until(self, ends: tuple[int, ...]) -> SamplingParams:
        """Return the settings; `ends` are tokens that end the text."""
        max_tokens = None if self.n_predict < 0 else self.n_predict
        stop_token_ids = (*ends, *(self.stop_token_ids or ()))
        return self.sampling_params(max_tokens, stop_token_ids=stop_token_ids)


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["llama.cpp"], responses=OPENAI_ERRORS, route_class=BodyRoute)

    @router.post("/infill", summary="Fill in the middle of a text", responses=WHOLE_OR_STREAM)
    async def infill(body: InfillRequest, request: Request) -> Response:
        head = ResponseHead.new("infill-", "", request.headers)
        with preparing(services, _FIELDS):
            call = await _call(services, body, request)
        if body.stream:
            return EventStream(_stream(services, call), openai_error_event, head.headers)
        (generation,), (output,) = await run_to_end(services, [call], _FIELDS, request)
        completion = output.outputs[0]
        end = {"tokens": completion.token_ids, **_end(generation, completion)}
        return head.response({"content": completion.text, **end})

    return router


async def _call(services: GatewayServices, body: InfillRequest, request: Request) -> GenerationCall:
    model = services.models.find(body.model or "")
    tokens = InfillTokens.of({} if model.config.model.skip_tokenizer_init else model.tokenizer.added_tokens())
    if tokens is None:
        problem = f"{model.name} has no tokens that mark a prefix, a suffix and a middle; use /v1/completions"
        raise InvalidRequest("model", problem)
    if len(body.input_extra) > _MAX_FILES:
        problem = f"has {len(body.input_extra)} files, must have at most {_MAX_FILES}"
        raise InvalidRequest("input_extra", problem)
    call = with_context(body.call("", body.sampling_until(tokens.ends)), request, services)

    async def encoded(text: str, *, special: bool = False) -> list[int]:
        part = replace(call, prompt=text, add_special_tokens=special)
        return await prompt_token_ids(services, part)

    before = await encoded("", special=True)
    before = before[: len(before) - model.tokenizer.num_end_tokens]
    files = [
        (await encoded(f"{each.filename}\n"), await encoded(f"{each.text}\n")) for each in body.input_extra
    ]
    parts = [await encoded(text) for text in (body.input_prefix, body.input_suffix, body.prompt)]
    return replace(call, prompt=tokens.prompt(before, files, *parts))


async def _stream(services: GatewayServices, call: GenerationCall) -> AsyncGenerator[bytes, None]:
    with renamed_fields(_FIELDS):
        async with services.generation.run(call) as generation:
            async for event in generation.events:
                if isinstance(event, CompletionDelta):
                    yield _event({"content": event.text, "tokens": event.token_ids, "stop": False})
                elif isinstance(event, CompletionFinished):
                    yield _event({"content": "", "tokens": [], **_end(generation, event)})


def _event(value: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % json_bytes(value)


def _end(generation: Generation, completion: CompletionOutput | CompletionFinished) -> dict[str, Any]:
    """Return the members of a response that is complete."""
    usage: Usage = completion.usage
    is_word = isinstance(completion.stop_reason, str)
    kinds = {"length": "limit", "stop": "word" if is_word else "eos"}
    return {
        "stop": True,
        "stop_type": kinds.get(completion.finish_reason or "", "none"),
        "stopping_word": completion.stop_reason if is_word else "",
        "model": generation.model_name,
        "tokens_predicted": usage.completion_tokens,
        "tokens_evaluated": usage.prompt_tokens,
        "tokens_cached": usage.cached_tokens,
        "timings": timings_json(completion.timings),
    }
