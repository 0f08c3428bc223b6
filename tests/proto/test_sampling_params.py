"""SamplingParams refuses invalid values, with the field and the given value."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.proto.errors import InvalidRequest
from quire.proto.sampling import SamplingDefaults, SamplingParams
from quire.proto.structured_outputs import StructuredOutputsParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.5),
        ("logprobs", -2),
        ("seed", 2**63),
        ("stop", ("",)),
        ("stop", ("x",) * 17),
        ("stop", ("x" * 257,)),
        ("stop_token_ids", tuple(range(65))),
        pytest.param("max_tokens", 10**5000, id="max_tokens-beyond what Python prints"),
        ("temperature", 10**400),
        ("stop_token_ids", [2**70]),
        ("logit_bias", {1: 10**400}),
        ("n", 0),
        ("n", 17),
        ("best_of", 0),
        ("beam_width", 17),
        ("length_penalty", math.inf),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("bad_words", ("",)),
        ("bad_words", ("  ",)),
        ("bad_words", ((),)),
        ("bad_words", [None]),
        ("bad_words", ("x",) * 257),
        ("allowed_token_ids", ()),
        ("prompt_logprobs", -2),
        ("truncate_prompt_tokens", 0),
        ("repetition_penalty", 1e-300),
    ],
)
def test_value_out_of_range_is_refused_with_its_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field) as caught:
        SamplingParams(**{field: value})
    assert isinstance(caught.value, InvalidRequest)
    assert not isinstance(caught.value, TypeError)
    assert caught.value.field.partition("[")[0] == f"sampling.{field}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("n", 2.0),
        ("n", None),
        ("seed", 1.5),
        ("top_k", [4]),
        ("logprobs", "all"),
        ("temperature", "1"),
        ("top_p", [0.5]),
        ("length_penalty", None),
        ("frequency_penalty", "0"),
        ("ignore_eos", "no"),
        ("skip_special_tokens", None),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stop", {"a", "b"}),
        ("stop", {"a": 1}),
        ("stop", b"a"),
        ("stop_token_ids", 7),
        ("stop_token_ids", "end"),
        ("stop_token_ids", {7}),
        ("stop_token_ids", {7: 1.0}),
        ("early_stopping", "never"),
        ("detokenize", 0),
        ("logit_bias", 5),
        ("logit_bias", [1]),
        ("logit_bias", {1, 2}),
        ("logit_bias", {1: "much"}),
        ("logit_bias", {1.5: 1.0}),
        ("bad_words", [[1.5]]),
        ("bad_words", (7,)),
        ("bad_words", frozenset(("a",))),
        ("allowed_token_ids", "ab"),
        ("allowed_token_ids", (1.5,)),
        ("allowed_token_ids", {1: 2}),
    ],
)
def test_value_of_wrong_type_is_refused_with_its_field(field: str, value: Any) -> None:
    """Otherwise such a value would fail a step of the ranks, for all of its requests."""
    with pytest.raises(TypeError) as caught:
        SamplingParams(**{field: value})
    assert isinstance(caught.value, InvalidRequest)
    assert caught.value.field.partition("[")[0] == f"sampling.{field}"


def test_long_value_is_cut_in_the_error() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(beam_width=2, allowed_token_ids=tuple(range(50_000)))
    assert len(str(caught.value)) < 400


def test_wrong_item_of_a_list_is_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(bad_words=("a", (3, 2.5)))  # type: ignore[arg-type]
    assert caught.value.field == "sampling.bad_words[1][1]"


def test_none_is_an_empty_list() -> None:
    given = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None, bad_words=None)  # type: ignore[arg-type]
    assert given == SamplingParams()


def test_numpy_numbers_become_plain_python() -> None:
    given = SamplingParams(n=np.int8(2), temperature=np.float32(0.5), top_p=1, ignore_eos=np.True_)  # type: ignore[arg-type]
    assert [type(value) for value in (given.n, given.temperature, given.top_p, given.ignore_eos)] == [
        int, float, float, bool,
    ]  # fmt: skip


def test_minus_one_stands_for_all() -> None:
    given = SamplingParams(top_k=-1, logprobs=-1, prompt_logprobs=-1)
    assert given == SamplingParams(top_k=0, logprobs=-1, prompt_logprobs=-1)


def test_field_that_was_set_is_checked_in_the_next_use() -> None:
    params = SamplingParams()
    params.stop, params.max_tokens = "END", 7  # type: ignore[assignment]
    assert params.clone() == SamplingParams(stop=("END",), max_tokens=7)
    params.temperature = -1.0
    with pytest.raises(InvalidRequest, match=r"temperature: is -1\.0"):
        params.clone()


def test_stop_strings_need_text() -> None:
    assert SamplingParams(stop_token_ids=[3], detokenize=False).stop_token_ids == (3,)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"stop: is \['x'\], must be empty without detokenize"):
        SamplingParams(stop=("x",), detokenize=False)


def test_minimum_repetition_penalty_is_valid_as_float32() -> None:
    assert SamplingParams(repetition_penalty=float(np.float32(0.01))).repetition_penalty is not None


@pytest.mark.parametrize("bias", [100.5, -101, math.nan])
def test_bias_out_of_range_names_its_token(bias: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(logit_bias={3: 1.0, 7: bias})
    assert caught.value.field == "sampling.logit_bias[7]"


def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at most max_tokens, 3"):
        SamplingParams(max_tokens=3, min_tokens=4)
    assert SamplingParams(max_tokens=None, min_tokens=4).min_tokens == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 4), ("stop", "end"), ("logprobs", 0), ("n", 5), ("repetition_penalty", 1.1),
        ("frequency_penalty", 1.0), ("presence_penalty", 1.0), ("logit_bias", {1: 1.0}), ("bad_words", "no"),
        ("allowed_token_ids", [1]),
    ],
)  # fmt: skip
def test_settings_that_beam_search_does_not_allow_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match="beam_width"):
        SamplingParams(**({"beam_width": 4} | {field: value}))


def test_outputs_are_ranked_if_best_of_exceeds_one() -> None:
    assert not SamplingParams(n=3).is_ranked
    assert not SamplingParams(best_of=1).is_ranked
    assert SamplingParams(n=2, best_of=2).is_ranked
    assert SamplingParams(n=2, best_of=5).num_sequences == 5


def test_stop_may_be_a_single_string() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1]).stop_token_ids == (1,)  # type: ignore[arg-type]


def test_equivalent_forms_of_logits_processor_settings_are_equal() -> None:
    given = SamplingParams(logit_bias={9: 2, 3: -1.5}, bad_words=["a", [1, 2]], allowed_token_ids=[4, 4, 2])  # type: ignore[arg-type]
    assert given.logit_bias == ((3, -1.5), (9, 2.0))
    assert given.bad_words == ("a", (1, 2))
    assert given.allowed_token_ids == (4, 2)
    assert replace(given, n=2) == replace(given, logit_bias=((3, -1.5), (9, 2.0)), n=2)
    assert SamplingParams(bad_words="a b").bad_words == ("a b",)  # type: ignore[arg-type]
    numpy_ids = SamplingParams(allowed_token_ids=np.arange(3), logit_bias={np.int32(4): np.float32(1)})  # type: ignore[arg-type, dict-item]
    assert numpy_ids == SamplingParams(allowed_token_ids=(0, 1, 2), logit_bias={4: 1.0})
    assert type((numpy_ids.allowed_token_ids or ())[0]) is int


def test_model_defaults_apply_to_unset_values_only() -> None:
    of_model = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05)
    unset = SamplingParams().with_defaults(of_model)
    assert (unset.temperature, unset.top_k, unset.top_p, unset.min_p, unset.repetition_penalty) == (
        0.6, 20, 0.95, 0.0, 1.05,
    )  # fmt: skip
    # A set value is kept, even if it equals the default of a model without its own.
    explicit = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0)
    assert explicit.with_defaults(of_model) == replace(explicit, min_p=0.0)
    assert SamplingParams().with_defaults(SamplingDefaults()).temperature == 1.0


def test_fields_of_a_form_that_ask_for_nothing_are_ignored() -> None:
    given = {"regex": "a+", "json": None, "disable_fallback": False, "whitespace_pattern": None}
    params = SamplingParams(structured_outputs=given)  # type: ignore[arg-type]
    assert params.structured_outputs == StructuredOutputsParams(regex="a+")
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.whitespace_pattern: is unknown"):
        SamplingParams(structured_outputs={**given, "whitespace_pattern": " "})  # type: ignore[arg-type]
