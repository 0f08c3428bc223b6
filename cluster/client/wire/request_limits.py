"""check_counts: refuses lists of a request that are too long, before any of their entries is converted.

The checks of SamplingParams come after the conversion to Python objects, which takes 2.6 s for 1.3 million empty
`bad_token_ids` in a message of 4 MB (AMD EPYC, one core).
"""

from __future__ import annotations

from collections.abc import Sized

from ....proto import inference_pb2
from ....proto.errors import InvalidRequest
from ....proto.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_OUTPUTS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

# Of a prompt that is truncated: converting these takes 20 ms.
MAX_TRUNCATED_TOKENS = 1 << 20


def check_counts(message: inference_pb2.GenerateRequest, max_prompt_tokens: int) -> None:
    """Raises InvalidRequest, which names the field, if a list is longer than any valid request's.

    Args:
        max_prompt_tokens: the longest prompt that the model serves.
    """
    sampling = message.sampling
    for field, given, limit in (
        ("sampling.stop", sampling.stop, MAX_STOP_STRINGS),
        ("sampling.stop_token_ids", sampling.stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("sampling.logit_bias", sampling.logit_bias, MAX_LOGIT_BIASES),
        ("sampling.bad_words", sampling.bad_words, MAX_BAD_WORDS),
        ("sampling.bad_token_ids", sampling.bad_token_ids, 2 * MAX_BAD_WORDS),
        ("sampling.allowed_token_ids", sampling.allowed_token_ids.ids, MAX_ALLOWED_TOKEN_IDS),
        ("received.outputs", message.received.outputs, MAX_OUTPUTS),
    ):
        _check(field, given, limit, "entries")
    for index, word in enumerate(sampling.bad_token_ids):
        _check(f"sampling.bad_token_ids[{index}]", word.ids, MAX_BAD_WORD_TOKENS, "tokens")
    num_tokens = len(message.token_ids.ids)
    if sampling.HasField("truncate_prompt_tokens"):
        max_prompt_tokens = max(max_prompt_tokens, MAX_TRUNCATED_TOKENS)
    if num_tokens > max_prompt_tokens:
        raise InvalidRequest("prompt", f"has {num_tokens} tokens, must have at most {max_prompt_tokens}")


def _check(field: str, given: Sized, limit: int, unit: str) -> None:
    if len(given) > limit:
        raise InvalidRequest(field, f"has {len(given)} {unit}, must have at most {limit}")
