"""Every error that quire raises on purpose, each leaf with its one gRPC status.

QuireError
├── InvalidRequest            INVALID_ARGUMENT     the request can never be served as it is
├── ModelNotFound             NOT_FOUND            no such model is served here
├── Unauthenticated           UNAUTHENTICATED      the token is missing or wrong
├── PermissionDenied          PERMISSION_DENIED    the token is not an operator's
├── DuplicateRequest          ALREADY_EXISTS       a running request has this request_id
├── Overloaded                RESOURCE_EXHAUSTED   the queue is full; retry later
├── RequestAborted            CANCELLED            ended by its caller or by an operator
├── DeadlineExpired           DEADLINE_EXCEEDED    the caller's deadline passed
├── ConfigError               FAILED_PRECONDITION  the configuration cannot be started
│   └── ModelLoadError        FAILED_PRECONDITION  the model directory cannot be read
├── ReplicaUnavailable        UNAVAILABLE          no replica answers
│   └── RankFailed            UNAVAILABLE          a rank died, hung or diverged; names it, the step and the stage
└── ProtocolError             INTERNAL             a message between processes cannot be read
"""

from __future__ import annotations

MAX_REASON_CHARS = 500


class QuireError(Exception):
    """Base class of every error that quire raises on purpose."""

    grpc_status = "UNKNOWN"


class InvalidRequest(QuireError):
    """The request can never be served as it is.

    Args:
        field: the request's invalid field, as named in quire.v1 (for example ``sampling.temperature``).
        problem: the given value and the allowed values.
    """

    grpc_status = "INVALID_ARGUMENT"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class ModelNotFound(QuireError):
    """No replica serves the requested model."""

    grpc_status = "NOT_FOUND"


class Unauthenticated(QuireError):
    """The call's token is missing or wrong."""

    grpc_status = "UNAUTHENTICATED"


class PermissionDenied(QuireError):
    """The call's token is valid here but does not permit the call."""

    grpc_status = "PERMISSION_DENIED"


class DuplicateRequest(QuireError):
    """A request with this request_id is already running."""

    grpc_status = "ALREADY_EXISTS"


class Overloaded(QuireError):
    """The waiting queue is full. The request was not started and may be sent again."""

    grpc_status = "RESOURCE_EXHAUSTED"


class RequestAborted(QuireError):
    """The request was ended by its caller or by an operator."""

    grpc_status = "CANCELLED"


class DeadlineExpired(QuireError):
    """The caller's deadline passed before the output was complete."""

    grpc_status = "DEADLINE_EXCEEDED"


class ConfigError(QuireError):
    """The configuration cannot be started as it is."""

    grpc_status = "FAILED_PRECONDITION"


class ModelLoadError(ConfigError):
    """The model directory cannot be read; names the file, the tensor and the reason."""


class ReplicaUnavailable(QuireError):
    """The replica does not answer, or is shutting down."""

    grpc_status = "UNAVAILABLE"


class RankFailed(ReplicaUnavailable):
    """A rank died, hung, or holds block tables that differ from the scheduler's.

    Args:
        rank: the failed rank.
        reason: the observed failure.
        step_id: the step that waited for the rank; None outside a step.
        stage: the last stage that the rank reported (``forward``, ``sample``, ...), if known.
    """

    def __init__(self, rank: int, reason: str, step_id: int | None = None, stage: str | None = None) -> None:
        where = "" if step_id is None else f" at step {step_id}"
        doing = "" if stage is None else f" in stage {stage}"
        super().__init__(f"rank {rank} failed{where}{doing}: {reason}")
        self.rank = rank
        self.reason = reason
        self.step_id = step_id
        self.stage = stage

    def __reduce__(self) -> tuple[type[RankFailed], tuple[int, str, int | None, str | None]]:
        # Ray pickles this error; the default would rebuild it from its message alone.
        return RankFailed, (self.rank, self.reason, self.step_id, self.stage)


class ProtocolError(QuireError):
    """A message between processes has an unknown version or shape."""

    grpc_status = "INTERNAL"


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
    if grpc_status == InvalidRequest.grpc_status:
        field, _, problem = message.partition(": ")
        return InvalidRequest(field, problem)
    return _BY_STATUS.get(grpc_status, QuireError)(message)


_BY_STATUS: dict[str, type[QuireError]] = {
    kind.grpc_status: kind
    for kind in (
        ModelNotFound,
        Unauthenticated,
        PermissionDenied,
        DuplicateRequest,
        Overloaded,
        RequestAborted,
        DeadlineExpired,
        ConfigError,
        ReplicaUnavailable,
        ProtocolError,
    )
}
