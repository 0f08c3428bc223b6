"""Conversions between requests and the request messages of quire.v1, for the gateway and the clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ....proto import inference_pb2
from ....proto.errors import InvalidRequest
from ....proto.sampling import SamplingParams
from ....proto.structured_outputs import RepetitionDetectionParams, StructuredOutputsParams
from ...text.requests.chat import Chat
from ...text.requests.request import Prompt
from ...text.requests.resume_position import CompletionPosition, ResumePosition
from .chat_messages import chat_from_message, chat_to_message

_SAMPLING_SCALARS = (
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos", "logprobs",
    "n", "best_of", "beam_width", "length_penalty", "early_stopping", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "prompt_logprobs", "skip_special_tokens", "include_stop_str_in_output",
    "truncate_prompt_tokens", "detokenize", "thinking_token_budget",
)  # fmt: skip
# Sent for max_tokens=None: the server lowers it to what the context leaves for a completion.
_MAX_TOKENS_UNLIMITED = (1 << 31) - 1


@contextmanager
def as_invalid_request(field: str) -> Iterator[None]:
    """Convert protobuf's errors for a value that no message can hold to an InvalidRequest that names the field."""
    try:
        yield
    except InvalidRequest:
        raise
    except (ValueError, TypeError) as error:
        raise InvalidRequest(field, f"cannot be sent: {error}") from error


def sampling_to_message(params: SamplingParams) -> inference_pb2.SamplingParams:
    """Raises InvalidRequest if a field was set to a value out of its range."""
    params = params.clone()
    values = {name: value for name in _SAMPLING_SCALARS if (value := getattr(params, name)) is not None}
    values.setdefault("max_tokens", _MAX_TOKENS_UNLIMITED)
    words = params.bad_words
    with as_invalid_request("sampling"):
        message = inference_pb2.SamplingParams(
            **values,
            stop=params.stop,
            stop_token_ids=params.stop_token_ids,
            logit_bias=dict(params.bias_pairs),
            extra_args=dict(params.extra_arg_pairs),
            bad_words=[word for word in words if isinstance(word, str)],
            bad_token_ids=[inference_pb2.TokenIds(ids=word) for word in words if not isinstance(word, str)],
        )
        if params.allowed_token_ids is not None:
            message.allowed_token_ids.CopyFrom(inference_pb2.TokenIds(ids=params.allowed_token_ids))
        if params.structured_outputs is not None:
            message.structured_outputs.CopyFrom(_structured_outputs_to_message(params.structured_outputs))
        if params.repetition_detection is not None:
            message.repetition_detection.CopyFrom(
                inference_pb2.RepetitionDetection(**params.repetition_detection._asdict())
            )
    return message


def sampling_from_message(message: inference_pb2.SamplingParams) -> SamplingParams:
    """Raises InvalidRequest for a value out of its range."""
    given = {name: getattr(message, name) for name in _SAMPLING_SCALARS if message.HasField(name)}
    has_allowed = message.HasField("allowed_token_ids")
    repetition = message.repetition_detection if message.HasField("repetition_detection") else None
    return SamplingParams(
        **given,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        extra_args=tuple(message.extra_args.items()),
        bad_words=(*message.bad_words, *(tuple(word.ids) for word in message.bad_token_ids)),
        allowed_token_ids=tuple(message.allowed_token_ids.ids) if has_allowed else None,
        structured_outputs=(
            _structured_outputs_from_message(message.structured_outputs)
            if message.HasField("structured_outputs")
            else None
        ),
        repetition_detection=(
            None
            if repetition is None
            else RepetitionDetectionParams(
                repetition.max_pattern_size, repetition.min_pattern_size, repetition.min_count
            )
        ),
    )


def _structured_outputs_to_message(params: StructuredOutputsParams) -> inference_pb2.StructuredOutputs:
    value = getattr(params, params.kind)
    constraint: dict[str, Any] = {
        params.kind: inference_pb2.Choices(texts=value) if params.kind == "choice" else value
    }
    return inference_pb2.StructuredOutputs(
        disable_any_whitespace=params.disable_any_whitespace,
        disable_additional_properties=params.disable_additional_properties,
        **constraint,
    )


def _structured_outputs_from_message(message: inference_pb2.StructuredOutputs) -> StructuredOutputsParams:
    kind = message.WhichOneof("constraint")
    given: dict[str, Any] = {}
    if kind is not None:
        value = getattr(message, kind)
        given[kind] = list(value.texts) if kind == "choice" else value
    return StructuredOutputsParams(
        **given,
        disable_any_whitespace=message.disable_any_whitespace,
        disable_additional_properties=message.disable_additional_properties,
    )


def set_prompt(
    message: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, prompt: Prompt
) -> None:
    """Raises InvalidRequest for a prompt that no message can hold."""
    if isinstance(prompt, Chat):
        prompt.check()
        with as_invalid_request("chat"):
            message.chat.MergeFrom(chat_to_message(prompt))
    elif isinstance(prompt, str):
        with as_invalid_request("prompt"):
            message.text = prompt
    elif isinstance(message, inference_pb2.TokenizeRequest):
        raise InvalidRequest("prompt", "has token ids already, must be text or a chat")
    else:
        with as_invalid_request("prompt"):
            message.token_ids.CopyFrom(inference_pb2.TokenIds(ids=prompt))


def prompt_from_message(message: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> Prompt:
    """Raises InvalidRequest if the message has no prompt."""
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt", "is missing, must be text, token_ids or chat")
    if kind == "chat":
        return chat_from_message(message.chat)
    if isinstance(message, inference_pb2.TokenizeRequest) or kind == "text":
        return message.text
    return list(message.token_ids.ids)


def resume_position_to_message(position: ResumePosition) -> inference_pb2.Received:
    return inference_pb2.Received(
        outputs=[
            inference_pb2.ReceivedOutput(
                index=index,
                num_tokens=output.num_tokens,
                checksum=output.checksum,
                has_last=output.has_last,
                has_finished=output.has_finished,
            )
            for index, output in position.outputs.items()
        ],
        num_prompt_logprobs=position.num_prompt_logprobs,
        num_deltas=position.num_deltas,
    )


def resume_position_from_message(message: inference_pb2.Received) -> ResumePosition:
    """Raises InvalidRequest for a negative number."""
    numbers = [message.num_prompt_logprobs, message.num_deltas]
    numbers += [number for each in message.outputs for number in (each.index, each.num_tokens)]
    if min(numbers) < 0:
        raise InvalidRequest("received", f"has the number {min(numbers)}, must be at least 0")
    outputs = {
        each.index: CompletionPosition(each.num_tokens, each.checksum, each.has_last, each.has_finished)
        for each in message.outputs
    }
    return ResumePosition(outputs, message.num_prompt_logprobs, message.num_deltas)
