"""Errors cross process borders by status, and errors of other libraries become one line."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from quire.proto.errors import (
    MAX_REASON_CHARS,
    DuplicateRequest,
    InvalidRequest,
    QuireError,
    RankFailed,
    ReplicaUnavailable,
    first_line,
    from_status,
    in_one_line,
    joined_lines,
)

ERROR = ValueError("\n first line \nsecond line")
ERROR.__cause__ = KeyError("cause")


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (first_line, "first line "),
        (in_one_line, "ValueError: first line "),
        (joined_lines, "first line second line: 'cause'"),
    ],
)
def test_error_becomes_one_line(function: Callable[[BaseException], str], line: str) -> None:
    assert function(ERROR) == line


def test_error_without_message_is_its_type() -> None:
    assert first_line(ValueError()) == in_one_line(ValueError()) == joined_lines(ValueError()) == "ValueError"


def test_long_message_is_cut() -> None:
    assert len(first_line(ValueError("x" * 10_000))) == MAX_REASON_CHARS


@pytest.mark.parametrize("error", [DuplicateRequest("id 7"), InvalidRequest("sampling.n", "is 0")])
def test_error_is_rebuilt_from_its_status(error: QuireError) -> None:
    rebuilt = from_status(error.grpc_status, str(error))
    assert type(rebuilt) is type(error)
    assert str(rebuilt) == str(error)


def test_unknown_status_is_the_base_error() -> None:
    assert type(from_status("DATA_LOSS", "lost")) is QuireError


def test_rank_failed_survives_pickling_and_travels_as_unavailable() -> None:
    error = RankFailed(1, "died", 7, "forward")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (copy.rank, copy.reason, copy.step_id, copy.stage) == (1, "died", 7, "forward")
    assert str(copy) == "rank 1 failed at step 7 in stage forward: died"
    assert type(from_status(error.grpc_status, str(error))) is ReplicaUnavailable
