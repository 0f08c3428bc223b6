"""Conversions between the output types and the response messages of quire.v1, for the gateway and the clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

from ....proto import inference_pb2
from ....proto.errors import ProtocolError
from ....proto.sampling import SamplingParams
from ...text.chat_format.deltas import AssistantMessage
from ...text.requests.outputs import (
    CompletionDelta,
    CompletionFinished,
    CompletionOutput,
    PositionLogprobs,
    PromptLogprobsDelta,
    RequestOutput,
    RequestStarted,
    StreamEvent,
    most_likely,
    position_logprobs,
)
from .chat_messages import deltas_from_message, deltas_to_message
from .message_fields import from_message, to_message

_FINISH_REASONS = {
    "stop": inference_pb2.FINISH_REASON_STOP,
    "length": inference_pb2.FINISH_REASON_LENGTH,
    "tool_calls": inference_pb2.FINISH_REASON_TOOL_CALLS,
    "repetition": inference_pb2.FINISH_REASON_REPETITION,
}
_OF_FINISHED = tuple(each.name for each in fields(CompletionFinished))
_FINISH_REASON_NAMES = {number: name for name, number in _FINISH_REASONS.items()}


def event_to_message(event: StreamEvent, sampling: SamplingParams) -> inference_pb2.GenerateEvent:
    """`sampling`: of the request, with the numbers of log-probabilities that it asked for."""
    if isinstance(event, CompletionDelta):
        return inference_pb2.GenerateEvent(delta=_delta_to_message(event, sampling.logprobs))
    if isinstance(event, CompletionFinished):
        return inference_pb2.GenerateEvent(finished=_finished_to_message(event))
    if isinstance(event, PromptLogprobsDelta):
        message = _prompt_logprobs_to_message(
            event.start, event.token_ids, event.logprobs, sampling.prompt_logprobs
        )
        return inference_pb2.GenerateEvent(prompt_logprobs=message)
    assert isinstance(event, RequestStarted), "a pooled request is no stream"
    return inference_pb2.GenerateEvent(started=to_message(inference_pb2.Started, event))


def event_from_message(message: inference_pb2.GenerateEvent) -> StreamEvent:
    """Raises ProtocolError for an event that only later versions of quire have."""
    kind = message.WhichOneof("event")
    if kind == "delta":
        return _delta_from_message(message.delta)
    if kind == "finished":
        return _finished_from_message(message.finished)
    if kind == "prompt_logprobs":
        entries = message.prompt_logprobs
        token_ids = list(entries.token_ids)
        return PromptLogprobsDelta(
            entries.start, token_ids, _logprobs_from_messages(token_ids, entries.logprobs)
        )
    if kind == "started":
        return from_message(RequestStarted, message.started)
    raise ProtocolError("the server sent an event that this version of the client does not support")


def output_to_message(output: RequestOutput, sampling: SamplingParams) -> inference_pb2.GenerateResponse:
    """`output.prompt_token_ids` must be set if `output.prompt_logprobs` is.

    Args:
        sampling: settings of the request, with the numbers of log-probabilities that it asked for.
    """
    completions = (_completion_to_message(completion, sampling.logprobs) for completion in output.outputs)
    response = inference_pb2.GenerateResponse(
        request_id=output.request_id, model=output.model, outputs=completions
    )
    if output.prompt_logprobs is not None:
        assert output.prompt_token_ids is not None
        known = (entry for entry in output.prompt_logprobs if entry is not None)
        token_ids = output.prompt_token_ids[1:]
        message = _prompt_logprobs_to_message(1, token_ids, known, sampling.prompt_logprobs)
        response.prompt_logprobs.CopyFrom(message)
    return response


def output_from_message(
    message: inference_pb2.GenerateResponse, prompt: str | None, prompt_token_ids: list[int] | None
) -> RequestOutput:
    """`prompt` and `prompt_token_ids` are those that the client sent, which the message does not contain."""
    of_prompt: list[PositionLogprobs | None] | None = None
    if message.HasField("prompt_logprobs"):
        entries = message.prompt_logprobs
        of_prompt = [None, *_logprobs_from_messages(entries.token_ids, entries.logprobs)]
    return RequestOutput(
        request_id=message.request_id,
        model=message.model,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        outputs=[_completion_from_message(output) for output in message.outputs],
        prompt_logprobs=of_prompt,
    )


def _completion_to_message(output: CompletionOutput, num_top: int | None) -> inference_pb2.Output:
    return inference_pb2.Output(
        index=output.index,
        text=output.text,
        token_ids=output.token_ids,
        logprobs=_logprobs_to_messages(output.token_ids, output.logprobs or (), num_top),
        finished=_finished_to_message(output),
        message=None
        if output.message is None
        else to_message(inference_pb2.AssistantMessage, output.message),
    )


def _completion_from_message(message: inference_pb2.Output) -> CompletionOutput:
    token_ids, finished = list(message.token_ids), _finished_from_message(message.finished)
    return CompletionOutput(
        text=message.text,
        token_ids=token_ids,
        logprobs=_logprobs_from_messages(token_ids, message.logprobs) or None,
        message=from_message(AssistantMessage, message.message) if message.HasField("message") else None,
        **{name: getattr(finished, name) for name in _OF_FINISHED},
    )


def _delta_to_message(delta: CompletionDelta, num_top: int | None) -> inference_pb2.Delta:
    return inference_pb2.Delta(
        sequence_number=delta.sequence_number,
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=_logprobs_to_messages(delta.token_ids, delta.logprobs, num_top),
        chat=None if delta.chat is None else deltas_to_message(delta.chat),
        is_last=delta.is_last,
    )


def _delta_from_message(message: inference_pb2.Delta) -> CompletionDelta:
    token_ids = list(message.token_ids)
    logprobs = _logprobs_from_messages(token_ids, message.logprobs)
    chat = deltas_from_message(message.chat) if message.HasField("chat") else None
    number, is_last = message.sequence_number, message.is_last
    return CompletionDelta(message.index, message.text, token_ids, logprobs, number, chat, is_last)


def _prompt_logprobs_to_message(
    start: int, token_ids: Sequence[int], logprobs: Iterable[PositionLogprobs], num_top: int | None
) -> inference_pb2.PromptLogprobs:
    entries = _logprobs_to_messages(token_ids, logprobs, num_top)
    return inference_pb2.PromptLogprobs(start=start, logprobs=entries, token_ids=token_ids)


def _logprobs_to_messages(
    token_ids: Sequence[int], logprobs: Iterable[PositionLogprobs], num_top: int | None
) -> list[inference_pb2.TokenLogprobs]:
    """`logprobs`: one entry per token, or empty."""
    return [
        _logprobs_to_message(token_id, entry, num_top or 0)
        for token_id, entry in zip(token_ids, logprobs, strict=False)
    ]


def _logprobs_to_message(token_id: int, entry: PositionLogprobs, num_top: int) -> inference_pb2.TokenLogprobs:
    top = most_likely(entry, num_top)
    return inference_pb2.TokenLogprobs(
        chosen=entry[token_id].logprob,
        rank=entry[token_id].rank,
        top_token_ids=[top_id for top_id, _ in top],
        top_logprobs=[logprob.logprob for _, logprob in top],
    )


def _logprobs_from_messages(
    token_ids: Sequence[int], messages: Sequence[inference_pb2.TokenLogprobs]
) -> list[PositionLogprobs]:
    """Raises ProtocolError unless there is one message per token, or none."""
    if messages and len(messages) != len(token_ids):
        raise ProtocolError(
            f"the server sent {len(messages)} log-probabilities for {len(token_ids)} tokens, must be one each"
        )
    return [
        position_logprobs(token_id, message.chosen, message.rank, message.top_token_ids, message.top_logprobs)
        for token_id, message in zip(token_ids, messages, strict=False)
    ]


def _finished_to_message(finished: CompletionFinished | CompletionOutput) -> inference_pb2.Finished:
    stop_reason = finished.stop_reason
    return to_message(
        inference_pb2.Finished,
        finished,
        reason=_FINISH_REASONS[finished.finish_reason or ""],
        stop_string=stop_reason if isinstance(stop_reason, str) else None,
        stop_token_id=stop_reason if isinstance(stop_reason, int) else None,
    )


def _finished_from_message(message: inference_pb2.Finished) -> CompletionFinished:
    finish_reason = _FINISH_REASON_NAMES.get(message.reason)
    if finish_reason is None:
        raise ProtocolError(
            f"the server sent finish reason {message.reason}, which this version of the client does not support"
        )
    stopped_by = message.WhichOneof("stopped_by")
    stop_reason = None if stopped_by is None else getattr(message, stopped_by)
    return from_message(CompletionFinished, message, finish_reason=finish_reason, stop_reason=stop_reason)
