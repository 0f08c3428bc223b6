"""Authentication: the caller behind a call, from its bearer token, and the calls that its roles permit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health

from ....proto import admin_pb2, inference_pb2
from ....proto.errors import InvalidRequest, PermissionDenied, QuireError, Unauthenticated
from ...client.wire.grpc_status import to_grpc_status
from ...client.wire.tokens import AUTHORIZATION, BEARER, NO_TOKENS, Role, TokenSet
from ...os_utils.watched_file import Source

_OPEN_METHODS = f"/{health.SERVICE_NAME}/"
# Prefix of a method |-> the role that its callers need. Methods of other services need any valid token.
_ROLE_OF_METHODS = {
    f"/{inference_pb2.DESCRIPTOR.services_by_name['Inference'].full_name}/": Role.USER,
    f"/{admin_pb2.DESCRIPTOR.services_by_name['Admin'].full_name}/": Role.OPERATOR,
}

Metadata = Iterable[tuple[str, str | bytes]] | None


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller, over whatever protocol.

    Attributes:
        tenant: None if the caller names the tenant of each call itself.
        roles: permitted calls.
    """

    tenant: str | None
    roles: frozenset[Role]

    def require(self, role: Role) -> None:
        """Raises PermissionDenied for a caller that has neither this role nor that of operators."""
        if role not in self.roles and Role.OPERATOR not in self.roles:
            raise PermissionDenied(
                f"this call needs a token with the role {role}; this token has {', '.join(sorted(self.roles))}"
            )


# Caller of a server without tokens.
ANYONE = Caller(None, frozenset({Role.OPERATOR}))


class Authenticator:
    """Finds the callers of calls.

    Args:
        tokens: the valid tokens; empty if calls need none.
    """

    def __init__(self, tokens: Source[TokenSet] = NO_TOKENS) -> None:
        self._tokens = tokens

    def caller(self, authorization: str | None) -> Caller:
        """Return the caller of a call with this Authorization header or metadata.

        Raises:
            Unauthenticated: calls need a token, and the call carries none or a wrong one.
        """
        tokens = self._tokens()
        if not tokens:
            return ANYONE
        if authorization is None or authorization[: len(BEARER)].lower() != BEARER.lower():
            raise Unauthenticated("the call carries no bearer token")
        token = tokens.find(authorization[len(BEARER) :].strip().encode(errors="replace"))
        if token is None:
            raise Unauthenticated("the call's bearer token is not one of this server's")
        return Caller(token.tenant, token.roles)

    def tenant(self, caller: Caller, claimed: str) -> str:
        """Return the tenant of a call: the caller's, or the claimed one if the caller has none of its own.

        Raises:
            InvalidRequest: the call claims the tenant of another token.
        """
        own = caller.tenant
        if claimed and claimed != own and (own is not None or claimed in self._tokens().tenants):
            raise InvalidRequest("tenant", f"is {claimed!r}, which the call's token is not of")
        return claimed if own is None else own


def authorization_of(metadata: Metadata) -> str | None:
    """Return the value of a gRPC call's Authorization metadata."""
    value = dict(metadata or ()).get(AUTHORIZATION)
    return value.decode("latin-1") if isinstance(value, bytes) else value


class AuthenticationInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that rejects calls without a token whose roles permit them.

    Health calls need no token: load balancers have none.

    Args:
        on_refused: receives the error of each call that is rejected.
    """

    def __init__(self, authenticator: Authenticator, on_refused: Callable[[QuireError], None]) -> None:
        self._authenticator = authenticator
        self._on_refused = on_refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        try:
            self._check(handler_call_details)
        except QuireError as error:
            self._on_refused(error)
            return _reject(error)
        return await continuation(handler_call_details)

    def _check(self, details: grpc.HandlerCallDetails) -> None:
        if details.method.startswith(_OPEN_METHODS):
            return
        caller = self._authenticator.caller(authorization_of(details.invocation_metadata))
        for prefix, role in _ROLE_OF_METHODS.items():
            if details.method.startswith(prefix):
                caller.require(role)


def _reject(error: QuireError) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler that aborts any call, unary or streaming, with the error."""

    async def abort(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort_with_status(to_grpc_status(error))

    return grpc.stream_stream_rpc_method_handler(abort)
