"""Conversions between requests and the request messages of quire.v1, for the gateway and the clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ....proto import inference_pb2
from ....proto.errors import InvalidRequest
from ....proto.sampling import SamplingParams
from ....proto.structured_outputs import StructuredOutputsParams
from ...text.requests.chat import Chat
from ...text.requests.request import Prompt
from ...text.requests.resume_position import CompletionPosition, ResumePosition
from .chat_messages import chat_from_message, chat_to_message
from .message_fields import from_message, to_message

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
    words, allowed = params.bad_words, params.allowed_token_ids
    constraint = params.structured_outputs
    with as_invalid_request("sampling"):
        return to_message(
            inference_pb2.SamplingParams,
            params,
            max_tokens=_MAX_TOKENS_UNLIMITED if params.max_tokens is None else params.max_tokens,
            logit_bias=dict(params.bias_pairs),
            extra_args=dict(params.extra_arg_pairs),
            bad_words=[word for word in words if isinstance(word, str)],
            bad_token_ids=[inference_pb2.TokenIds(ids=word) for word in words if not isinstance(word, str)],
            allowed_token_ids=None if allowed is None else inference_pb2.TokenIds(ids=allowed),
            structured_outputs=None if constraint is None else _constraint_to_message(constraint),
        )


def sampling_from_message(message: inference_pb2.SamplingParams) -> SamplingParams:
    """Raises InvalidRequest for a value out of its range."""
    has_allowed, has_constraint = (
        message.HasField(name) for name in ("allowed_token_ids", "structured_outputs")
    )
    return from_message(
        SamplingParams,
        message,
        logit_bias=dict(message.logit_bias),
        extra_args=tuple(message.extra_args.items()),
        bad_words=(*message.bad_words, *(tuple(word.ids) for word in message.bad_token_ids)),
        allowed_token_ids=tuple(message.allowed_token_ids.ids) if has_allowed else None,
        structured_outputs=_constraint_from_message(message.structured_outputs) if has_constraint else None,
    )


def _constraint_to_message(params: StructuredOutputsParams) -> inference_pb2.StructuredOutputs:
    choices = None if params.choice is None else inference_pb2.Choices(texts=params.choice)
    return to_message(inference_pb2.StructuredOutputs, params, choice=choices)


def _constraint_from_message(message: inference_pb2.StructuredOutputs) -> StructuredOutputsParams:
    choice = list(message.choice.texts) if message.HasField("choice") else None
    return from_message(StructuredOutputsParams, message, choice=choice)


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
    outputs = [
        to_message(inference_pb2.ReceivedOutput, output, index=index)
        for index, output in position.outputs.items()
    ]
    return to_message(inference_pb2.Received, position, outputs=outputs)


def resume_position_from_message(message: inference_pb2.Received) -> ResumePosition:
    """Raises InvalidRequest for a negative number."""
    numbers = [message.num_prompt_logprobs, message.num_deltas]
    numbers += [number for each in message.outputs for number in (each.index, each.num_tokens)]
    if min(numbers) < 0:
        raise InvalidRequest("received", f"has the number {min(numbers)}, must be at least 0")
    outputs = {each.index: from_message(CompletionPosition, each) for each in message.outputs}
    return from_message(ResumePosition, message, outputs=outputs)
