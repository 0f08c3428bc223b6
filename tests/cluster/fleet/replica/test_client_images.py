"""ReplicaClient sends the images of a running request to a replica that asks for them, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.text.requests.request import Request
from quire.proto.media import MEDIA_PIECE_BYTES, MediaAssembly, MediaItem
from quire.proto.sampling import SamplingParams
from quire.proto.stream import (
    Finish,
    FinishReason,
    GatewayMessage,
    MediaUpload,
    MediaWanted,
    ReplicaMessage,
    Submit,
    TokenBatch,
    decode,
    encode,
)

DIGEST = b"0123456789abcdef"
TENSORS = {"pixel_values": np.arange(3 * MEDIA_PIECE_BYTES // 4 + 5, dtype=np.float32)}


class FakeConnection:
    """A connection whose other end is the test. Implements `Connection`."""

    def __init__(self) -> None:
        self.sent: list[GatewayMessage] = []
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()

    def open(self) -> None: ...

    def send(self, frame: bytes) -> None:
        self.sent.append(decode(frame))  # type: ignore[arg-type]

    async def receive(self) -> bytes:
        return await self._frames.get()

    def receive_arrived(self) -> bytes | None:
        return None if self._frames.empty() else self._frames.get_nowait()

    async def wait_until_lost(self) -> None:
        await asyncio.Event().wait()

    async def close(self, linger_ms: int) -> None: ...

    def answer(self, message: ReplicaMessage) -> None:
        self._frames.put_nowait(encode(message))

    @property
    def uploads(self) -> list[MediaUpload]:
        return [message for message in self.sent if isinstance(message, MediaUpload)]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0)


@pytest.fixture
def connection() -> FakeConnection:
    return FakeConnection()


@pytest.fixture
@asynccontextmanager
async def client(connection: FakeConnection) -> AsyncIterator[ReplicaClient]:
    client = ReplicaClient("fake", "replica-0", connection=connection)
    client.start()
    try:
        yield client
    finally:
        await client.close()


def request(n: int = 1) -> Request:
    item = MediaItem(DIGEST, 1, 2, 2, (), TENSORS["pixel_values"].nbytes)
    prompt = np.arange(5, dtype=np.int32)
    sampling = SamplingParams(n=n, max_tokens=4)
    return Request("r", prompt, sampling, media=(item,), media_tensors={DIGEST: TENSORS})


async def test_images_are_sent_when_the_replica_asks(
    client: ReplicaClient, connection: FakeConnection
) -> None:
    running = client.submit(request(n=2))
    submits = [message for message in connection.sent if isinstance(message, Submit)]
    assert [len(message.media) for message in submits] == [1]
    await asyncio.sleep(0.01)
    assert not connection.uploads
    connection.answer(MediaWanted(running.handles[1], (DIGEST, b"another digest!!")))
    await connection.until(lambda: len(connection.uploads) == 4)
    assembly = MediaAssembly(connection.uploads[0].layout)
    for piece in connection.uploads:
        assembly.add(piece.offset, piece.data)
    np.testing.assert_array_equal(assembly.tensors()["pixel_values"], TENSORS["pixel_values"])


async def test_image_that_is_asked_for_again_is_sent_from_its_beginning(
    client: ReplicaClient, connection: FakeConnection
) -> None:
    running = client.submit(request())
    connection.answer(MediaWanted(running.handles[0], (DIGEST,)))
    await connection.until(lambda: bool(connection.uploads))
    connection.answer(MediaWanted(running.handles[0], (DIGEST,)))
    await connection.until(lambda: sum(piece.offset == 0 for piece in connection.uploads) == 2)
    await connection.until(lambda: connection.uploads[-1].offset == 3 * MEDIA_PIECE_BYTES)
    last = [piece.offset for piece in connection.uploads][-4:]
    assert last == [index * MEDIA_PIECE_BYTES for index in range(4)]


async def test_images_of_a_request_that_has_ended_are_forgotten(
    client: ReplicaClient, connection: FakeConnection
) -> None:
    ended, aborted = client.submit(request()), client.submit(request())
    connection.answer(TokenBatch(1, finished=(Finish(ended.handles[0], FinishReason.STOP),)))
    await connection.until(lambda: client.num_running == 1)
    aborted.abort()
    for handle in (ended.handles[0], aborted.handles[0], 77):
        connection.answer(MediaWanted(handle, (DIGEST,)))
    kept = client.submit(request())
    connection.answer(MediaWanted(kept.handles[0], (DIGEST,)))
    await connection.until(lambda: len(connection.uploads) == 4)
    await asyncio.sleep(0.01)
    assert len(connection.uploads) == 4
