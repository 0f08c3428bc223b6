"""Errors cross process borders by status, and errors of other libraries become one line."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.proto.errors import (
    DEFAULT_RETRY_S,
    ERRORS,
    MAX_REASON_CHARS,
    DuplicateRequest,
    InvalidRequest,
    InvalidType,
    Overloaded,
    QuireError,
    QuotaExceeded,
    RankFailed,
    ReplicaUnavailable,
    first_line,
    from_reason,
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


def test_rank_failed_travels_as_unavailable_where_only_the_status_is_kept() -> None:
    error = RankFailed(1, "died", 7, "forward")
    assert str(error) == "rank 1 failed at step 7 in stage forward: died"
    assert type(from_status(error.grpc_status, str(error))) is ReplicaUnavailable


def made(kind: type[QuireError]) -> QuireError:
    """An error of the class, with every attribute set."""
    arguments: dict[type[QuireError], tuple[Any, ...]] = {
        InvalidRequest: ("sampling.n", "is 0: must be 1"),
        InvalidType: ("sampling.n", "is of type str: must be a whole number"),
        QuotaExceeded: ("acme", "tokens_per_minute", 1000.0),
        RankFailed: (1, "died", 7, "forward"),
    }
    error = kind(*arguments.get(kind, ("no luck",)))
    if kind.is_retriable:
        error.retry_after_s = 2.5
    return error


@pytest.mark.parametrize("kind", ERRORS.values())
def test_error_survives_pickling(kind: type[QuireError]) -> None:
    error = made(kind)
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(copy) is kind
    assert (str(copy), vars(copy)) == (str(error), vars(error))


@pytest.mark.parametrize("kind", ERRORS.values())
def test_error_is_rebuilt_from_its_reason(kind: type[QuireError]) -> None:
    error = made(kind)
    rebuilt = from_reason(error.reason, error.grpc_status, str(error), error.metadata, error.retry_after_s)
    assert type(rebuilt) is kind
    assert (str(rebuilt), vars(rebuilt)) == (str(error), vars(error))


def test_reasons_are_unique_and_every_leaf_is_in_the_table() -> None:
    def leaves(kind: type[QuireError]) -> Iterator[type[QuireError]]:
        for leaf in kind.__subclasses__():
            yield leaf
            yield from leaves(leaf)

    defined = [leaf for leaf in leaves(QuireError) if leaf.__module__ == QuireError.__module__]
    assert {leaf.reason: leaf for leaf in defined} == ERRORS
    assert len(defined) == len(ERRORS)
    assert all(re.fullmatch("[A-Z][A-Z_]+[A-Z]", reason) for reason in ERRORS)


def test_malformed_metadata_of_a_peer_is_none() -> None:
    error = from_reason("RANK_FAILED", "UNAVAILABLE", "rank x failed", {"rank": "x"})
    assert isinstance(error, RankFailed)
    assert vars(error) == {"rank": None, "problem": None, "step_id": None, "stage": None}
    assert str(error) == "rank x failed"


def test_reason_of_a_later_version_falls_back_to_its_status() -> None:
    assert type(from_reason("TOO_BUSY", "RESOURCE_EXHAUSTED", "later", {})) is Overloaded


def test_retriable_error_has_a_delay_and_no_other_error_has_one() -> None:
    assert Overloaded("full", retry_after_s=7.5).retry_delay_s == 7.5
    assert ReplicaUnavailable("gone").retry_delay_s == DEFAULT_RETRY_S
    assert InvalidRequest("n", "is 0").retry_delay_s is None
