"""SamplingParams refuses what cannot be served, by name and with the number that was given."""

from __future__ import annotations

import math
from typing import Any

import pytest

from quire.proto.errors import InvalidRequest
from quire.proto.sampling import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.5),
        ("logprobs", 21),
        ("logprobs", -1),
        ("seed", 2**63),
        ("stop", ("",)),
        ("stop", ("x",) * 17),
        ("stop", ("x" * 257,)),
        ("stop_token_ids", tuple(range(65))),
    ],
)
def test_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == f"sampling.{field}"


def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at most max_tokens, 3"):
        SamplingParams(max_tokens=3, min_tokens=4)
    assert SamplingParams(max_tokens=None, min_tokens=4).min_tokens == 4


def test_one_stop_string_may_be_given_alone() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1]).stop_token_ids == (1,)  # type: ignore[arg-type]
