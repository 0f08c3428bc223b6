"""Authentication of calls by bearer token."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health

from ...proto.errors import InvalidRequest, QuireError, Unauthenticated
from ..api.grpc_status import to_grpc_status
from ..api.tokens import AUTHORIZATION, BEARER, Token

# Calls with a token of this tenant may change a fleet.
ADMIN_TENANT = "admin"

_OPEN_METHODS = f"/{health.SERVICE_NAME}/"

Metadata = Iterable[tuple[str, str | bytes]] | None


class Authenticator:
    """Checks the tokens of calls.

    Args:
        tokens: the valid tokens; empty if calls need none.
    """

    def __init__(self, tokens: tuple[Token, ...] = ()) -> None:
        self._tokens = tokens
        self._reserved_tenants = {token.tenant for token in tokens if token.tenant is not None}

    def token(self, metadata: Metadata) -> Token | None:
        """Return the token that a call carries; None if calls need none.

        Raises:
            Unauthenticated: the call carries no valid token.
        """
        if not self._tokens:
            return None
        authorization = dict(metadata or ()).get(AUTHORIZATION)
        if isinstance(authorization, bytes):
            authorization = authorization.decode("latin-1")
        if authorization is None or not authorization.startswith(BEARER):
            raise Unauthenticated("the call carries no bearer token")
        secret = authorization.removeprefix(BEARER).strip().encode()
        # Compares all tokens, each in constant time, so that the time taken reveals nothing about them.
        matching = [token for token in self._tokens if hmac.compare_digest(secret, token.secret)]
        if not matching:
            raise Unauthenticated("the call's bearer token is not one of this server's")
        return matching[0]

    def tenant(self, metadata: Metadata, claimed: str) -> str:
        """Return a call's tenant: that of its token, or the claimed one if the token names none.

        Raises:
            InvalidRequest: the call claims the tenant of another token.
            Unauthenticated: the call carries no valid token.
        """
        token = self.token(metadata)
        own = None if token is None else token.tenant
        if claimed and claimed != own and (own is not None or claimed in self._reserved_tenants):
            raise InvalidRequest("tenant", f"is {claimed!r}, which the call's token is not of")
        return claimed if own is None else own


class AuthenticationInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that rejects calls without a valid token. Health calls need none: load balancers have no token."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if not handler_call_details.method.startswith(_OPEN_METHODS):
            try:
                self._authenticator.token(handler_call_details.invocation_metadata)
            except QuireError as error:
                return _reject(error)
        return await continuation(handler_call_details)


def _reject(error: QuireError) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler that aborts any call, unary or streaming, with the error."""

    async def abort(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort_with_status(to_grpc_status(error))

    return grpc.stream_stream_rpc_method_handler(abort)
