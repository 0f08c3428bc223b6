"""Every error quire raises on purpose, each leaf with the one gRPC status it becomes at the edge.

QuireError
├── InvalidRequest            INVALID_ARGUMENT     the caller's request can never be served as it is
├── ModelNotFound             NOT_FOUND            no such model is served here
├── Unauthenticated           UNAUTHENTICATED      the token is missing or wrong
├── PermissionDenied          PERMISSION_DENIED    the token is not one of an operator
├── DuplicateRequest          ALREADY_EXISTS       a running request has this request_id
├── Overloaded                RESOURCE_EXHAUSTED   the queue is full: come back later
├── RequestAborted            CANCELLED            ended by its caller or by an operator
├── DeadlineExpired           DEADLINE_EXCEEDED    the caller's deadline passed
├── ConfigError               FAILED_PRECONDITION  the operator asked for what cannot be started
│   └── ModelLoadError        FAILED_PRECONDITION  a model directory that cannot be read
├── ReplicaUnavailable        UNAVAILABLE          no replica answers
│   └── RankFailed            UNAVAILABLE          a rank died, hung or diverged; names it, the step and the stage
└── ProtocolError             INTERNAL             a message that one side wrote and the other cannot read
"""

from __future__ import annotations

MAX_REASON_CHARS = 500


class QuireError(Exception):
    """Base of every error that quire raises on purpose."""

    grpc_status = "UNKNOWN"


class InvalidRequest(QuireError):
    """The request can never be served as it is.

    Args:
        field: name of the request's field at fault, as in quire.v1 (for example ``sampling.temperature``).
        problem: what is wrong with it, with the number that was given and the one that is allowed.
    """

    grpc_status = "INVALID_ARGUMENT"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class ModelNotFound(QuireError):
    """No replica serves the model that was asked for."""

    grpc_status = "NOT_FOUND"


class Unauthenticated(QuireError):
    """The call's token is missing or wrong."""

    grpc_status = "UNAUTHENTICATED"


class PermissionDenied(QuireError):
    """The call's token is one of this server's, but not one that may do this."""

    grpc_status = "PERMISSION_DENIED"


class DuplicateRequest(QuireError):
    """A request with this request_id is running already."""

    grpc_status = "ALREADY_EXISTS"


class Overloaded(QuireError):
    """The waiting queue is full. The request was not started and may be sent again."""

    grpc_status = "RESOURCE_EXHAUSTED"


class RequestAborted(QuireError):
    """The request was ended by its caller or by an operator."""

    grpc_status = "CANCELLED"


class DeadlineExpired(QuireError):
    """The caller's deadline passed before the answer was complete."""

    grpc_status = "DEADLINE_EXCEEDED"


class ConfigError(QuireError):
    """The operator asked for something that cannot be started as it is."""

    grpc_status = "FAILED_PRECONDITION"


class ModelLoadError(ConfigError):
    """A model directory that cannot be read: which file, which tensor, and why."""


class ReplicaUnavailable(QuireError):
    """The replica does not answer, or is shutting down."""

    grpc_status = "UNAVAILABLE"


class RankFailed(ReplicaUnavailable):
    """A rank died, hung, or holds block tables that differ from the scheduler's.

    Args:
        rank: the rank at fault.
        reason: what was seen.
        step_id: the step it was waited for, or None outside a step.
        stage: the last stage it reported (``forward``, ``sample``, ...), if known.
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
        # Ray carries this error between processes; the default would rebuild it from its message alone.
        return RankFailed, (self.rank, self.reason, self.step_id, self.stage)


class ProtocolError(QuireError):
    """A message of an unknown version or shape."""

    grpc_status = "INTERNAL"


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line of bounded length; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:MAX_REASON_CHARS]


def in_one_line(error: BaseException) -> str:
    """An error's kind and what it says, in one line of bounded length."""
    kind, said = type(error).__name__, first_line(error)
    return kind if said == kind else f"{kind}: {said}"


def from_status(grpc_status: str, message: str) -> QuireError:
    """The error of that status, made again on the other side of a process border."""
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
