"""Counting the fields of encoded messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cluster.gateway.grpc.message_guard import has_more_fields
from quire.proto import inference_pb2

KIND: Any = inference_pb2.GenerateRequest.DESCRIPTOR


def num_fields(raw: bytes) -> int:
    """The count, found by asking for every limit."""
    return next(limit for limit in range(1000) if not has_more_fields(raw, KIND, limit))


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 0),
        ({"text": "x" * 1000, "priority": -1}, 2),
        ({"token_ids": {"ids": [1, 300, 70_000]}}, 2),  # a packed list is one field
        ({"sampling": {"stop": ["a", "b"], "temperature": 0.5, "length_penalty": 0.5}}, 5),
        ({"sampling": {"bad_token_ids": [{}, {}, {"ids": [1]}]}}, 5),
        ({"sampling": {"logit_bias": {5: 1.0}}}, 4),
        ({"chat": {"messages": [{"role": "user", "content": "hi"}] * 3}}, 10),
        ({"chat": {"template_options": {"a": {"b": [None, True]}}}}, 14),
    ],
)
def test_fields_of_nested_messages_are_counted(fields: dict[str, Any], count: int) -> None:
    assert num_fields(inference_pb2.GenerateRequest(**fields).SerializeToString()) == count


@given(st.binary(max_size=200))
def test_malformed_message_is_counted_up_to_its_error(raw: bytes) -> None:
    assert num_fields(raw) <= len(raw)


HOSTILE: dict[str, Callable[[inference_pb2.GenerateRequest], object]] = {
    "bad_token_ids": lambda m: m.sampling.bad_token_ids.extend([inference_pb2.TokenIds()] * 100_000),
    "logit_bias": lambda m: m.sampling.logit_bias.update(dict.fromkeys(range(50_000), 1.0)),
    "messages": lambda m: m.chat.messages.extend([inference_pb2.ChatMessage()] * 100_000),
    "template_options": lambda m: m.chat.template_options.update({str(n): None for n in range(50_000)}),
}


@pytest.mark.parametrize("fill", HOSTILE.values(), ids=HOSTILE.keys())
def test_message_of_many_small_fields_is_found(
    fill: Callable[[inference_pb2.GenerateRequest], object],
) -> None:
    message = inference_pb2.GenerateRequest()
    fill(message)
    assert has_more_fields(message.SerializeToString(), KIND, 32_768)
