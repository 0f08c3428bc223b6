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
        ("n", 0),
        ("n", 17),
        ("best_of", 0),
        ("beam_width", 17),
        ("length_penalty", math.inf),
        ("early_stopping", "never"),
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


@pytest.mark.parametrize(("field", "value"), [("best_of", 4), ("stop", "end"), ("logprobs", 0), ("n", 5)])
def test_what_does_not_go_with_beam_search_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match="beam_width"):
        SamplingParams(**({"beam_width": 4} | {field: value}))


def test_answers_are_ranked_where_more_are_made_than_one() -> None:
    assert not SamplingParams(n=3).is_ranked
    assert not SamplingParams(best_of=1).is_ranked
    assert SamplingParams(n=2, best_of=2).is_ranked
    assert SamplingParams(n=2, best_of=5).num_sequences == 5


def test_one_stop_string_may_be_given_alone() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1]).stop_token_ids == (1,)  # type: ignore[arg-type]
