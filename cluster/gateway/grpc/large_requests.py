"""LargeRequests: receives requests that are larger than one message, in pieces and within bounds."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from ....proto import inference_pb2
from ....proto.errors import DeadlineExpired, InvalidRequest, Overloaded, QuotaExceeded
from .message_guard import parse

# As large as a file that is fetched from a URL. Parsing so much copies it once, in 10 ms.
MAX_REQUEST_BYTES = 32 << 20
# Of requests that are being received.
MAX_TENANT_BYTES = 64 << 20
MAX_BYTES = 512 << 20
# From the first piece to the last one.
RECEIVE_TIMEOUT_S = 60.0

_KIND: Any = inference_pb2.GenerateRequest.DESCRIPTOR


class LargeRequests:
    """Requests that arrive in pieces. For one event loop.

    The bytes that a request announces are reserved until it is complete: what arrives is bounded before it comes.
    """

    def __init__(self) -> None:
        self._reserved: Counter[str] = Counter()  # tenant |-> bytes

    async def receive(
        self, pieces: AsyncIterator[inference_pb2.RequestPiece], tenant: str
    ) -> inference_pb2.GenerateRequest:
        """Return the request.

        Raises:
            DeadlineExpired: the pieces did not come in time.
            InvalidRequest: they are more or fewer bytes than announced, or no request.
            Overloaded, QuotaExceeded: too many such requests are being received.
        """
        try:
            async with asyncio.timeout(RECEIVE_TIMEOUT_S):
                first = await anext(pieces, None)
                if first is None:
                    raise InvalidRequest("RequestPiece", "is missing, the call has no pieces")
                with self._reserve(first.num_bytes, tenant):
                    raw = await _join(first, pieces)
                    request = await asyncio.to_thread(parse, raw, _KIND)
        except TimeoutError:
            raise DeadlineExpired(
                f"the pieces of the request did not arrive within {RECEIVE_TIMEOUT_S:g} s"
            ) from None
        assert isinstance(request, inference_pb2.GenerateRequest)
        return request

    @contextmanager
    def _reserve(self, num_bytes: int, tenant: str) -> Iterator[None]:
        if not 0 < num_bytes <= MAX_REQUEST_BYTES:
            problem = f"is {num_bytes}, must be from 1 to {MAX_REQUEST_BYTES}"
            raise InvalidRequest("RequestPiece.num_bytes", problem)
        if self._reserved[tenant] + num_bytes > MAX_TENANT_BYTES:
            raise QuotaExceeded(tenant, "bytes_of_requests_in_pieces", MAX_TENANT_BYTES, retry_after_s=1.0)
        if self._reserved.total() + num_bytes > MAX_BYTES:
            raise Overloaded(f"requests of {MAX_BYTES} bytes are being received in pieces", retry_after_s=1.0)
        self._reserved[tenant] += num_bytes
        try:
            yield
        finally:
            self._reserved[tenant] -= num_bytes
            if not self._reserved[tenant]:
                del self._reserved[tenant]


async def _join(
    first: inference_pb2.RequestPiece, pieces: AsyncIterator[inference_pb2.RequestPiece]
) -> bytes:
    """Return the bytes of all pieces, as many as the first one announces."""
    found, num_missing = [first.data], first.num_bytes - len(first.data)
    while num_missing > 0 and (piece := await anext(pieces, None)) is not None:
        if not piece.data:
            raise InvalidRequest("RequestPiece.data", "is empty")
        found.append(piece.data)
        num_missing -= len(piece.data)
    if num_missing:
        given = first.num_bytes - num_missing
        raise InvalidRequest("RequestPiece", f"has {given} bytes in all, {first.num_bytes} were announced")
    return b"".join(found)
