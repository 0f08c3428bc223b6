"""Over tcp only holders of the fleet's keys can communicate."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import zmq

from quire.proto.transport.network import CurveGuard, CurveKeys, bind, connect, tcp_endpoint

RECEIVE_TIMEOUT_MS = 60_000
SILENCE_MS = 500


@pytest.fixture
def keys() -> CurveKeys:
    return CurveKeys.generate()


@pytest.fixture
def server(keys: CurveKeys) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """A ROUTER with a guard, and its endpoint."""
    context = zmq.Context()
    guard = CurveGuard(context, keys)
    socket = context.socket(zmq.ROUTER)
    yield socket, bind(socket, tcp_endpoint("127.0.0.1"), keys)
    guard.close()
    guard.close()
    context.destroy(linger=0)


@pytest.fixture
def client() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        yield socket


def test_client_with_the_keys_is_accepted(
    server: tuple[zmq.Socket[bytes], str], client: zmq.Socket[bytes], keys: CurveKeys
) -> None:
    socket, endpoint = server
    assert not endpoint.endswith(("*", ":0"))
    connect(client, endpoint, keys)
    client.send(b"question")
    assert socket.poll(RECEIVE_TIMEOUT_MS)
    sender, question = socket.recv_multipart()
    socket.send_multipart([sender, b"answer to " + question])
    assert client.poll(RECEIVE_TIMEOUT_MS)
    assert client.recv() == b"answer to question"


def with_the_public_key_only(client: zmq.Socket[bytes], endpoint: str, keys: CurveKeys) -> None:
    stranger = CurveKeys.generate()
    client.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
    client.setsockopt(zmq.CURVE_PUBLICKEY, stranger.public)
    client.setsockopt(zmq.CURVE_SECRETKEY, stranger.secret)
    client.connect(endpoint)


def in_the_clear(client: zmq.Socket[bytes], endpoint: str, keys: CurveKeys) -> None:
    client.connect(endpoint)


def of_another_fleet(client: zmq.Socket[bytes], endpoint: str, keys: CurveKeys) -> None:
    connect(client, endpoint, CurveKeys.generate())


@pytest.mark.parametrize("connect_as", [with_the_public_key_only, in_the_clear, of_another_fleet])
def test_client_without_the_keys_is_refused(
    server: tuple[zmq.Socket[bytes], str],
    client: zmq.Socket[bytes],
    keys: CurveKeys,
    connect_as: Callable[[zmq.Socket[bytes], str, CurveKeys], None],
) -> None:
    socket, endpoint = server
    connect_as(client, endpoint, keys)
    client.send(b"question")
    assert not socket.poll(SILENCE_MS)


def test_repr_does_not_contain_the_secret(keys: CurveKeys) -> None:
    assert keys.secret.decode() not in repr(keys)


def test_tcp_endpoint_brackets_ipv6_addresses() -> None:
    assert tcp_endpoint("10.0.0.1") == "tcp://10.0.0.1:*"
    assert tcp_endpoint("fd00::1") == "tcp://[fd00::1]:*"
