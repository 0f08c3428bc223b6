"""StepPlan, StepResult and StepFailure round-trip; unreadable frames are refused."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.proto.errors import ProtocolError
from quire.proto.step import (
    VERSION,
    Logprobs,
    NewSequence,
    PromptLogprobs,
    PromptScoring,
    RowLogitsProcessors,
    RowSampling,
    StepFailure,
    StepPlan,
    StepResult,
    decode_reply,
)

int32 = st.integers(-(2**31), 2**31 - 1)
int_arrays = st.lists(int32, max_size=20).map(lambda values: np.array(values, dtype=np.int32))
pairs = st.lists(st.tuples(int32, int32), max_size=8).map(
    lambda v: np.array(v, dtype=np.int32).reshape(-1, 2)
)
sizes = st.integers(0, 2**31 - 1)
id_tuples = st.lists(sizes, max_size=4).map(tuple)
logits_processors = st.builds(
    RowLogitsProcessors,
    num_prompt_tokens=sizes,
    repetition_penalty=st.floats(0.5, 2),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    logit_bias=st.lists(st.tuples(sizes, st.floats(-100, 100)), max_size=4).map(tuple),
    bad_words=st.lists(id_tuples, max_size=3).map(tuple),
    allowed_token_ids=st.none() | id_tuples,
    min_len=sizes,
    stop_token_ids=id_tuples,
)
samplings = st.builds(
    RowSampling,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(-(2**63), 2**63 - 1),
    logprobs=st.none() | st.integers(0, 20),
    logits_processors=st.none() | logits_processors,
    scoring=st.none() | st.builds(PromptScoring, num_top=sizes, start=sizes, end=sizes),
)
sequences = st.builds(
    NewSequence,
    row=st.integers(0, 1024),
    seq_id=st.integers(0, 2**62),
    token_ids=int_arrays,
    num_computed_tokens=st.integers(0, 2**31 - 1),
    block_ids=int_arrays,
    sampling=samplings,
    source_row=st.none() | st.integers(0, 1024),
    num_source_tokens=sizes,
    takes_constraint=st.booleans(),
)
plans = st.builds(
    StepPlan,
    step_id=st.integers(1, 2**62),
    epoch=st.integers(0, 2**62),
    digest=st.integers(0, 2**64 - 1),
    released_rows=int_arrays,
    new=st.lists(sequences, max_size=3).map(tuple),
    appended_rows=int_arrays,
    appended_ids=int_arrays,
    copies=pairs,
    swap_out=pairs,
    swap_in=pairs,
    selected_rows=int_arrays,
    selected_ids=int_arrays,
    held_rows=int_arrays,
    chunk_rows=int_arrays,
    chunk_lens=int_arrays,
)


def assert_same(actual: Any, expected: Any) -> None:
    """Equality of dataclasses that hold arrays."""
    assert type(actual) is type(expected)
    for field in fields(expected):
        one, other = getattr(actual, field.name), getattr(expected, field.name)
        if isinstance(other, np.ndarray):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        elif isinstance(other, tuple) and other and isinstance(other[0], NewSequence):
            assert len(one) == len(other)
            for member, expected_member in zip(one, other, strict=True):
                assert_same(member, expected_member)
        elif isinstance(other, Logprobs | PromptLogprobs):
            assert_same(one, other)
        else:
            assert one == other


@given(plans)
def test_plan_round_trip(plan: StepPlan) -> None:
    assert_same(StepPlan.decode(plan.encode()), plan)


@pytest.mark.parametrize("width", [0, 1, 5])
def test_result_round_trip(width: int) -> None:
    random = np.random.default_rng(width)
    top_ids = random.integers(0, 1000, (3, width)).astype(np.int32)
    top = random.standard_normal((3, width)).astype(np.float32)
    chosen = random.standard_normal(3).astype(np.float32)
    ranks = np.array([1, 9, 4], np.int32)
    logprobs = Logprobs(np.array([0, 2, 3], np.int32), chosen, ranks, top_ids, top)
    token_ids = np.array([5, 6, 7, 8], np.int32)
    scores = PromptLogprobs(np.array([1, 1, 6], np.int32), logprobs)
    result = StepResult(9, 2, 0, token_ids, logprobs, {"forward": 0.5}, scores, num_compilations=2)
    assert_same(decode_reply(result.encode()), result)


def test_failure_round_trip() -> None:
    failure = StepFailure(3, 1, 2, "forward", "RuntimeError: no memory")
    assert decode_reply(failure.encode()) == failure
    ended = replace(failure, ends_rank=True)
    assert decode_reply(ended.encode()) == ended


def test_selected_logprobs_index_into_the_selection() -> None:
    logprobs = Logprobs(
        np.array([0, 2, 5], np.int32),
        np.array([-1, -2, -3], np.float32),
        np.array([4, 5, 6], np.int32),
        np.array([[1], [2], [3]], np.int32),
        np.array([[-1], [-2], [-3]], np.float32),
    )
    chosen = logprobs.select(np.array([1, 2, 5], np.int32))
    assert chosen is not None
    assert chosen.index.tolist() == [1, 2]
    assert chosen.chosen.tolist() == [-2, -3]
    assert chosen.ranks.tolist() == [5, 6]
    assert logprobs.select(np.array([1, 3], np.int32)) is None


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x00",
        bytes((VERSION - 1, 0x90)),
        *(bytes((VERSION, *body)) for body in (b"", b"\x90", b"\xc1", b"\x93\x01\x02\x03")),
    ],
)
def test_unreadable_frame_is_a_protocol_error(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        StepPlan.decode(frame)
    with pytest.raises(ProtocolError):
        decode_reply(frame)


@given(st.binary(max_size=64))
def test_random_bytes_raise_only_protocol_errors(garbage: bytes) -> None:
    for decode in (StepPlan.decode, decode_reply):
        try:
            decode(bytes((VERSION,)) + garbage)
        except ProtocolError:
            continue


def test_steady_decode_plan_is_small() -> None:
    assert len(StepPlan(123_456, 1, 2**64 - 1).encode()) < 24


def test_plan_that_keeps_no_hidden_states_round_trips() -> None:
    assert StepPlan.decode(StepPlan(1, 1, 0).encode()).keeps_states
    assert not StepPlan.decode(StepPlan(1, 1, 0, keeps_states=False).encode()).keeps_states
