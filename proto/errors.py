"""Every error that quire raises on purpose, each leaf with its reason and its gRPC and HTTP statuses.

QuireError
├── InvalidRequest            INVALID_REQUEST       the request can never be served as it is; a ValueError too
│   └── InvalidType           INVALID_TYPE          a value has the wrong type; a TypeError too
├── ModelNotFound             MODEL_NOT_FOUND       no such model is served here
├── LoraLoadError             LORA_LOAD_FAILED      the adapter cannot be read, or does not fit the model
├── RequestNotFound           REQUEST_NOT_FOUND     the request to resume is not retained here
├── Unauthenticated           UNAUTHENTICATED       the token is missing or wrong
├── PermissionDenied          PERMISSION_DENIED     the token does not permit the call
├── DuplicateRequest          REQUEST_ID_IN_USE     another request of the tenant has this request_id
├── Overloaded                OVERLOADED            the queue is full, or too long for the deadline; retry later
├── QuotaExceeded             QUOTA_EXCEEDED        a limit of the tenant is reached; retry later
├── RequestAborted            REQUEST_ABORTED       ended by its caller or by an operator
├── DeadlineExpired           DEADLINE_EXPIRED      the caller's deadline passed
├── RequestQuarantined        REQUEST_QUARANTINED   the request failed the ranks repeatedly and is not run again
├── ConfigError               CONFIG_INVALID        the configuration cannot be started
│   └── ModelLoadError        MODEL_LOAD_FAILED     the model directory cannot be read
├── ReplicaUnavailable        REPLICA_UNAVAILABLE   no replica answers
│   ├── RankFailed            RANK_FAILED           a rank died, hung or diverged; names it, the step and the stage
│   ├── ShuttingDown          SHUTTING_DOWN         the gateway stops; another one may serve the request
│   └── ServerUnreachable     SERVER_UNREACHABLE    raised by clients: the connection failed or broke
└── ProtocolError             INTERNAL              a message between processes cannot be read

The class attributes are the one table of reasons; docs/errors.md shows it. A gRPC status carries the reason and the
`wire_fields` as google.rpc.ErrorInfo (`cluster.api.grpc_status`). An HTTP server answers with `http_status`, the
reason in its error's code, and the header Retry-After of `retry_delay_s`, rounded up, if that is not None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

MAX_REASON_CHARS = 500
# Delay before a retry after an error that says nothing better, in seconds.
DEFAULT_RETRY_S = 1.0

ErrorT = TypeVar("ErrorT", bound="QuireError")


class QuireError(Exception):
    """Base class of every error that quire raises on purpose.

    Attributes:
        reason: the error's name for programs, unique to its class.
        grpc_status: name of its gRPC status.
        http_status: its HTTP status.
        is_retriable: the same request may succeed later. No part of it has been executed, or its answer is lost.
        wire_fields: attribute |-> parser of its text; these attributes travel with the error to clients.
        retry_after_s: seconds after which a retry may succeed, if that was computed.
    """

    reason: ClassVar[str] = "UNKNOWN"
    grpc_status: ClassVar[str] = "UNKNOWN"
    http_status: ClassVar[int] = 500
    is_retriable: ClassVar[bool] = False
    wire_fields: ClassVar[Mapping[str, Callable[[str], Any]]] = {}

    retry_after_s: float | None = None

    @property
    def retry_delay_s(self) -> float | None:
        """Seconds to wait before a retry; None if the error is not retriable."""
        if not self.is_retriable:
            return None
        return DEFAULT_RETRY_S if self.retry_after_s is None else self.retry_after_s

    @property
    def metadata(self) -> dict[str, str]:
        """Name |-> text of the attributes in `wire_fields` that have a value."""
        values = {name: getattr(self, name) for name in self.wire_fields}
        return {name: str(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_wire(cls, message: str, metadata: Mapping[str, str], retry_after_s: float | None = None) -> Self:
        """Rebuild an error from its message and metadata. A missing or malformed attribute becomes None."""
        error = _rebuild(cls, (message,), {})
        for name, parse in cls.wire_fields.items():
            setattr(error, name, _parsed(parse, metadata.get(name)))
        if retry_after_s is not None:
            error.retry_after_s = retry_after_s
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls the class with the message alone, which loses the arguments of a leaf's own __init__.
        return _rebuild, (type(self), self.args, self.__dict__)


class InvalidRequest(QuireError, ValueError):
    """The request can never be served as it is.

    Args:
        field: the request's invalid field, as named in quire.v1 (for example ``sampling.temperature``).
        problem: the given value and the allowed values.
    """

    reason, grpc_status, http_status = "INVALID_REQUEST", "INVALID_ARGUMENT", 400
    wire_fields: ClassVar = {"field": str}

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    @classmethod
    def from_wire(cls, message: str, metadata: Mapping[str, str], retry_after_s: float | None = None) -> Self:
        """See `QuireError.from_wire`. Without metadata, the field is the message's text up to the first colon."""
        field = metadata.get("field", message.partition(": ")[0])
        return cls(field, message.removeprefix(f"{field}: "))


class InvalidType(InvalidRequest, TypeError):
    """A value of the request has the wrong type."""

    reason = "INVALID_TYPE"


class ModelNotFound(QuireError):
    """No replica serves the requested model."""

    reason, grpc_status, http_status = "MODEL_NOT_FOUND", "NOT_FOUND", 404


class LoraLoadError(QuireError):
    """A LoRA adapter cannot be read, or does not fit the model."""

    reason, grpc_status, http_status = "LORA_LOAD_FAILED", "INVALID_ARGUMENT", 400


class RequestNotFound(QuireError):
    """The request to resume cannot be: it was never started, its output was dropped, or the weights were changed."""

    reason, grpc_status, http_status = "REQUEST_NOT_FOUND", "NOT_FOUND", 404


class Unauthenticated(QuireError):
    """The call's token is missing or wrong."""

    reason, grpc_status, http_status = "UNAUTHENTICATED", "UNAUTHENTICATED", 401


class PermissionDenied(QuireError):
    """The call's token is valid here but does not permit the call."""

    reason, grpc_status, http_status = "PERMISSION_DENIED", "PERMISSION_DENIED", 403


class DuplicateRequest(QuireError):
    """Another request of the tenant has this request_id."""

    reason, grpc_status, http_status = "REQUEST_ID_IN_USE", "ALREADY_EXISTS", 409


class Overloaded(QuireError):
    """The waiting queue is full, or too long for the request's deadline. The request was not started.

    Args:
        retry_after_s: estimated time until the present queue is computed; None if unknown.
    """

    # 503 rather than 429: the server is busy, whoever calls.
    reason, grpc_status, http_status, is_retriable = "OVERLOADED", "RESOURCE_EXHAUSTED", 503, True

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceeded(QuireError):
    """A limit of the tenant is reached. The request was not started and may be sent again.

    Args:
        tenant: the tenant whose limit is reached.
        quota: name of the limit, for example ``requests_per_minute``.
        limit: its value.
        retry_after_s: time until the limit admits the request.
    """

    reason, grpc_status, http_status, is_retriable = "QUOTA_EXCEEDED", "RESOURCE_EXHAUSTED", 429, True
    wire_fields: ClassVar = {"tenant": str, "quota": str, "limit": float}

    def __init__(self, tenant: str, quota: str, limit: float, *, retry_after_s: float | None = None) -> None:
        super().__init__(f"tenant {tenant!r} has reached its limit of {limit:g} {quota.replace('_', ' ')}")
        self.tenant = tenant
        self.quota = quota
        self.limit = limit
        self.retry_after_s = retry_after_s


class RequestAborted(QuireError):
    """The request was ended by its caller or by an operator."""

    reason, grpc_status, http_status = "REQUEST_ABORTED", "CANCELLED", 499


class DeadlineExpired(QuireError):
    """The caller's deadline passed before the output was complete."""

    reason, grpc_status, http_status = "DEADLINE_EXPIRED", "DEADLINE_EXCEEDED", 504


class RequestQuarantined(QuireError):
    """The request's steps failed the worker group repeatedly, the last time without another request in the step."""

    reason, grpc_status, http_status = "REQUEST_QUARANTINED", "INTERNAL", 500


class ConfigError(QuireError):
    """The configuration cannot be started as it is.

    Attributes:
        problems: one text per problem if there are several; else empty.
    """

    reason, grpc_status, http_status = "CONFIG_INVALID", "FAILED_PRECONDITION", 400

    problems: tuple[str, ...] = ()

    @classmethod
    def of(cls, problems: Sequence[str]) -> Self:
        """Return the error of one or several problems."""
        error = cls("; ".join(problems))
        if len(problems) > 1:
            error.problems = tuple(problems)
        return error


class ModelLoadError(ConfigError):
    """The model directory cannot be read; names the file, the tensor and the reason."""

    reason = "MODEL_LOAD_FAILED"


class Problems:
    """Collects the ConfigError of each `with` block, so that one run names all problems::

    problems = Problems()
    with problems:
        check_one_thing()
    with problems:
        check_another()
    problems.raise_any()
    """

    def __init__(self) -> None:
        self._errors: list[ConfigError] = []

    def __len__(self) -> int:
        return len(self._errors)

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, ConfigError):
            return False
        self._errors.append(error)
        return True

    def raise_any(self) -> None:
        """Raise the error if there is one; of several, a ConfigError that names each problem once."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            texts = [text for error in self._errors for text in error.problems or (str(error),)]
            raise ConfigError.of(list(dict.fromkeys(texts)))


class ReplicaUnavailable(QuireError):
    """The replica does not answer, or is shutting down.

    Args:
        retry_after_s: estimated time until a replica answers; None if unknown.
    """

    reason, grpc_status, http_status, is_retriable = "REPLICA_UNAVAILABLE", "UNAVAILABLE", 503, True

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RankFailed(ReplicaUnavailable):
    """A rank died, hung, or holds block tables that differ from the scheduler's.

    Args:
        rank: the failed rank.
        problem: the observed failure.
        step_id: the step that waited for the rank; None outside a step.
        stage: the last stage that the rank reported (``forward``, ``sample``, ...), if known.
        is_step_error: the rank reported an exception in the step; its process lives and can use its device.
    """

    reason = "RANK_FAILED"
    wire_fields: ClassVar = {"rank": int, "problem": str, "step_id": int, "stage": str}

    is_step_error: bool = False

    def __init__(
        self,
        rank: int,
        problem: str,
        step_id: int | None = None,
        stage: str | None = None,
        *,
        is_step_error: bool = False,
    ) -> None:
        where = "" if step_id is None else f" at step {step_id}"
        doing = "" if stage is None else f" in stage {stage}"
        super().__init__(f"rank {rank} failed{where}{doing}: {problem}")
        self.rank = rank
        self.problem = problem
        self.step_id = step_id
        self.stage = stage
        if is_step_error:
            self.is_step_error = True


class ShuttingDown(ReplicaUnavailable):
    """The gateway stops. Calls that still run when its grace period ends are ended with this error."""

    reason = "SHUTTING_DOWN"


class ServerUnreachable(ReplicaUnavailable):
    """The connection to the server cannot be made, or broke. Raised by clients, never sent."""

    reason = "SERVER_UNREACHABLE"


class ProtocolError(QuireError):
    """A message between processes has an unknown version or shape."""

    reason, grpc_status, http_status = "INTERNAL", "INTERNAL", 500


# The classes by reason. Of those with the same gRPC status, the first stands for the status.
ERRORS: dict[str, type[QuireError]] = {
    kind.reason: kind
    for kind in (
        InvalidRequest,
        InvalidType,
        ModelNotFound,
        LoraLoadError,
        RequestNotFound,
        Unauthenticated,
        PermissionDenied,
        DuplicateRequest,
        Overloaded,
        QuotaExceeded,
        RequestAborted,
        DeadlineExpired,
        ConfigError,
        ModelLoadError,
        ReplicaUnavailable,
        RankFailed,
        ShuttingDown,
        ServerUnreachable,
        ProtocolError,
        RequestQuarantined,
    )
}
# gRPC status |-> the class that stands for it
_BY_STATUS = {kind.grpc_status: kind for kind in reversed(ERRORS.values())}


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, cut to MAX_REASON_CHARS; its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:MAX_REASON_CHARS]


def in_one_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message, cut to MAX_REASON_CHARS."""
    kind, message = type(error).__name__, first_line(error)
    return kind if message == kind else f"{kind}: {message}"


def joined_lines(error: BaseException) -> str:
    """Return an error's whole message and those of its causes in one line; its type if the message is empty."""
    message = " ".join(str(error).split()) or type(error).__name__
    return message if error.__cause__ is None else f"{message}: {joined_lines(error.__cause__)}"


def from_status(grpc_status: str, message: str) -> QuireError:
    """Rebuild an error from the status and message that another process sent."""
    return _BY_STATUS.get(grpc_status, QuireError).from_wire(message, {})


def from_reason(
    reason: str,
    grpc_status: str,
    message: str,
    metadata: Mapping[str, str],
    retry_after_s: float | None = None,
) -> QuireError:
    """Rebuild an error from its reason; from its status if the reason is one of a later version."""
    kind = ERRORS.get(reason) or _BY_STATUS.get(grpc_status, QuireError)
    return kind.from_wire(message, metadata, retry_after_s)


def _rebuild(kind: type[ErrorT], args: tuple[Any, ...], state: Mapping[str, Any]) -> ErrorT:
    """Return an error with this state, without a call of its __init__."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _parsed(parse: Callable[[str], Any], text: str | None) -> Any:
    try:
        return None if text is None else parse(text)
    except ValueError:
        return None
