"""Lists that are refused before their entries are converted."""

from __future__ import annotations

from typing import Any

import pytest

from quire.cluster.client.wire.request_messages import sampling_from_message
from quire.cluster.gateway.grpc.message_guard import MAX_TRUNCATED_TOKENS, check_counts
from quire.proto import inference_pb2
from quire.proto.errors import InvalidRequest

MAX_PROMPT = 100


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"stop": [""] * 17}, "sampling.stop"),
        ({"stop_token_ids": [1] * 65}, "sampling.stop_token_ids"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "sampling.logit_bias"),
        ({"bad_words": ["x"] * 257}, "sampling.bad_words"),
        ({"bad_token_ids": [{}] * 513}, "sampling.bad_token_ids"),
        ({"bad_token_ids": [{"ids": [1]}, {"ids": [1] * 1025}]}, "sampling.bad_token_ids[1]"),
        ({"allowed_token_ids": {"ids": [1] * 65_537}}, "sampling.allowed_token_ids"),
    ],
)
def test_list_that_no_valid_request_has_is_refused(sampling: dict[str, Any], field: str) -> None:
    message = inference_pb2.GenerateRequest(text="x", sampling=sampling)
    with pytest.raises(InvalidRequest, match="must have at most") as caught:
        check_counts(message, MAX_PROMPT)
    assert caught.value.field == field


def test_longest_lists_of_valid_requests_pass() -> None:
    sampling: Any = {
        "stop": ["x"] * 16,
        "stop_token_ids": [1] * 64,
        "logit_bias": dict.fromkeys(range(1024), 0.0),
        "bad_token_ids": [{"ids": [1] * 1024}] * 512,
        "allowed_token_ids": {"ids": range(65_536)},
    }
    message = inference_pb2.GenerateRequest(token_ids={"ids": [1] * MAX_PROMPT}, sampling=sampling)
    check_counts(message, MAX_PROMPT)
    sampling_from_message(message.sampling)


def test_prompt_longer_than_the_context_is_refused_unless_it_is_truncated() -> None:
    message = inference_pb2.GenerateRequest(token_ids={"ids": [1] * (MAX_PROMPT + 1)})
    with pytest.raises(InvalidRequest, match="prompt: has 101 tokens, must have at most 100"):
        check_counts(message, MAX_PROMPT)
    message.sampling.truncate_prompt_tokens = 5
    check_counts(message, MAX_PROMPT)
    message.token_ids.ids.extend([1] * MAX_TRUNCATED_TOKENS)
    with pytest.raises(InvalidRequest, match="prompt: has"):
        check_counts(message, MAX_PROMPT)
