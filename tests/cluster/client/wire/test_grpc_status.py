"""Errors as gRPC statuses with google.rpc details, and back."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from quire.cluster.client.wire.grpc_status import MAX_TEXT_BYTES, from_grpc_error, to_grpc_status
from quire.proto.errors import (
    InvalidRequest,
    ModelLoadError,
    Overloaded,
    QuireError,
    QuotaExceeded,
    RankFailed,
    ServerUnreachable,
    ShuttingDown,
)

_DETAILS = "grpc-status-details-bin"


class ReceivedError(grpc.RpcError):
    """The error that a client's call raises for a status."""

    def __init__(self, status: grpc.Status) -> None:
        super().__init__()
        self._status = status

    def code(self) -> grpc.StatusCode:
        return self._status.code

    def details(self) -> str:
        return str(self._status.details)

    def trailing_metadata(self) -> Any:
        return self._status.trailing_metadata


class PlainStatus(grpc.Status):
    def __init__(self, code: grpc.StatusCode) -> None:
        self.code, self.details, self.trailing_metadata = code, "no details", ()


def details_of(error: QuireError) -> list[str]:
    status = status_pb2.Status.FromString(dict(to_grpc_status(error).trailing_metadata)[_DETAILS])
    return [detail.TypeName() for detail in status.details]


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("sampling.n", "is 0: must be 1"),
        Overloaded("full", retry_after_s=7.25),
        QuotaExceeded("acme", "tokens_per_minute", 1000.0, retry_after_s=30.0),
        RankFailed(1, "died", 7, "forward"),
        ModelLoadError("no config.json"),
        ShuttingDown("stops"),
    ],
)
def test_status_carries_the_whole_error(error: QuireError) -> None:
    received = from_grpc_error(ReceivedError(to_grpc_status(error)), "server")
    assert type(received) is type(error)
    assert str(received) == str(error)
    assert received.metadata == error.metadata
    assert received.retry_delay_s == error.retry_delay_s


@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        (InvalidRequest("n", "is 0"), ["ErrorInfo", "BadRequest"]),
        (Overloaded("full"), ["ErrorInfo", "RetryInfo"]),
        (QuotaExceeded("acme", "requests_per_minute", 6.0), ["ErrorInfo", "QuotaFailure", "RetryInfo"]),
        (ModelLoadError("no config.json"), ["ErrorInfo"]),
    ],
)
def test_status_has_the_details_of_its_kind(error: QuireError, kinds: list[str]) -> None:
    assert details_of(error) == [f"google.rpc.{kind}" for kind in kinds]


def test_quota_failure_names_the_tenant() -> None:
    error = QuotaExceeded("acme", "requests_per_minute", 6.0)
    status = status_pb2.Status.FromString(dict(to_grpc_status(error).trailing_metadata)[_DETAILS])
    failure = error_details_pb2.QuotaFailure()
    assert status.details[1].Unpack(failure)
    (violation,) = failure.violations
    assert violation.subject == "tenant:acme"
    assert violation.description == "tenant 'acme' has reached its limit of 6 requests per minute"


def test_long_texts_fit_into_trailers() -> None:
    error = InvalidRequest("f" * 10_000, "\N{GRINNING FACE}" * 10_000)
    status = to_grpc_status(error)
    trailers = dict(status.trailing_metadata)[_DETAILS]
    assert len(status.details.encode()) <= MAX_TEXT_BYTES + 3
    assert len(trailers) * 4 / 3 + 3 * len(status.details.encode()) < 8192


def test_text_that_is_no_unicode_is_replaced() -> None:
    assert to_grpc_status(InvalidRequest("tenant", "is '\ud800'")).details == "tenant: is '?'"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, ServerUnreachable),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
        (grpc.StatusCode.DATA_LOSS, QuireError),
    ],
)
def test_status_without_details_names_the_server(code: grpc.StatusCode, kind: type[QuireError]) -> None:
    received = from_grpc_error(ReceivedError(PlainStatus(code)), "host:1")
    assert type(received) is kind
    assert str(received) == "host:1: no details"
