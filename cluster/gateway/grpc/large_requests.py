"""LargeRequests: receives requests that are larger than one message, in pieces and within bounds."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

from ....proto import inference_pb2
from ....proto.errors import DeadlineExpired, InvalidRequest, Overloaded, QuotaExceeded
from .message_guard import parse

# As large as a file that is fetched from a URL. Parsing so much copies it once, in 10 ms.
MAX_REQUEST_BYTES = 32 << 20
# Of requests that are being received, and of those that wait for their images to be processed.
MAX_TENANT_BYTES = 64 << 20
MAX_BYTES = 512 << 20
# A request as it came beside the parsed one, and that beside the files of its images.
COPIES = 2
# From the first piece to the last one.
RECEIVE_TIMEOUT_S = 60.0

_KIND: Any = inference_pb2.GenerateRequest.DESCRIPTOR


class LargeRequests:
    """Requests that arrive in pieces. For one event loop.

    The bytes that a request announces are reserved before they come. It takes at most COPIES times as many bytes of
    memory, however small its pieces are.
    """

    def __init__(self) -> None:
        self._reserved: Counter[str] = Counter()  # tenant |-> bytes

    @property
    def num_reserved_bytes(self) -> int:
        """Return the memory that is reserved."""
        return COPIES * self._reserved.total()

    @asynccontextmanager
    async def receive(
        self, pieces: AsyncIterator[inference_pb2.RequestPiece], tenant: str
    ) -> AsyncIterator[inference_pb2.GenerateRequest]:
        """Receive a request, whose bytes are reserved until the block ends.

        Raises:
            DeadlineExpired: the pieces did not come in time.
            InvalidRequest: they are more or fewer bytes than announced, or no request.
            Overloaded, QuotaExceeded: too many such requests are being received.
        """
        with ExitStack() as reserved:
            try:
                async with asyncio.timeout(RECEIVE_TIMEOUT_S):
                    first = await anext(pieces, None)
                    if first is None:
                        raise InvalidRequest("RequestPiece", "is missing, the call has no pieces")
                    reserved.enter_context(self._reserve(first.num_bytes, tenant))
                    raw = bytearray(first.num_bytes)
                    await _fill(raw, first, pieces)
            except TimeoutError:
                raise DeadlineExpired(
                    f"the pieces of the request did not arrive within {RECEIVE_TIMEOUT_S:g} s"
                ) from None
            request = await asyncio.to_thread(parse, raw, _KIND)
            del raw, first
            assert isinstance(request, inference_pb2.GenerateRequest)
            yield request

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


async def _fill(
    raw: bytearray, first: inference_pb2.RequestPiece, pieces: AsyncIterator[inference_pb2.RequestPiece]
) -> None:
    """Copy the bytes of all pieces, which are as many as the first one announces."""
    piece: inference_pb2.RequestPiece | None = first
    num_given = 0
    while num_given < len(raw) and piece is not None:
        data = piece.data
        if not data and piece is not first:
            raise InvalidRequest("RequestPiece.data", "is empty")
        if num_given + len(data) <= len(raw):
            raw[num_given : num_given + len(data)] = data
        num_given += len(data)
        if num_given < len(raw):
            piece = await anext(pieces, None)
    if num_given != len(raw):
        raise InvalidRequest("RequestPiece", f"has {num_given} bytes in all, {len(raw)} were announced")
