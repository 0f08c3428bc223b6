"""Connections of ZeroMQ sockets: ipc on one host, tcp with CURVE between hosts.

An ipc socket lies in a directory that only its owner may enter, and needs no key. Over tcp all processes of a fleet
share one keypair (CurveZMQ, ZeroMQ RFC 26): traffic is encrypted, a client connects only to a holder of the keypair,
and a server accepts only holders (`CurveGuard`). Heartbeats of ZeroMQ's own thread end the connection to a host that
vanished.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

from ..errors import ConfigError
from .wakeup import Wakeup

_HEARTBEAT_MS = 10_000
# Shorter than a step's default deadline, longer than a usual network outage: messages in flight are lost when a
# connection ends.
_SILENCE_MS = 30_000
_HANDSHAKE_MS = 10_000
_RECONNECT_MS = 100
_MAX_RECONNECT_MS = 5_000
# ZeroMQ asks at this endpoint whether to accept a client (RFC 27).
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A fleet's keypair, in Z85. Held only in the memory of the fleet's processes."""

    public: bytes
    secret: bytes = field(repr=False)

    @staticmethod
    def generate() -> CurveKeys:
        """Return a new keypair.

        Raises:
            ConfigError: this machine's ZeroMQ was built without CURVE.
        """
        if not zmq.has("curve"):
            raise ConfigError(
                "this machine's ZeroMQ library has no CURVE, which connections between hosts need: "
                "install pyzmq from its wheel"
            )
        return CurveKeys(*zmq.curve_keypair())


def tcp_endpoint(host: str) -> str:
    """Return the endpoint to bind on an address, at a port that the system chooses."""
    return f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"


def bind(socket: zmq.Socket[Any], endpoint: str, keys: CurveKeys | None) -> str:
    """Bind a socket, over tcp as a CURVE server; return the endpoint with the port that the system chose.

    The context of a tcp server must have a `CurveGuard`.
    """
    if endpoint.startswith("tcp://"):
        assert keys is not None, "tcp without keys would accept every client"
        _set_up_tcp(socket, endpoint)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.bind(endpoint)
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.rstrip(b"\0").decode()


def connect(socket: zmq.Socket[Any], endpoint: str, keys: CurveKeys | None) -> None:
    """Connect a socket, over tcp as a CURVE client. Returns immediately; ZeroMQ retries until connected."""
    if endpoint.startswith("tcp://"):
        assert keys is not None, "tcp without keys would connect to any server"
        _set_up_tcp(socket, endpoint)
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.connect(endpoint)


def _set_up_tcp(socket: zmq.Socket[Any], endpoint: str) -> None:
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, _SILENCE_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)


class CurveGuard:
    """Accepts only holders of one keypair at a context's CURVE servers: ZeroMQ's authentication protocol, RFC 27.

    Without a guard, a server accepts every client that knows its public key. Create the guard before the servers are
    bound, and close it before the context is destroyed.
    """

    def __init__(self, context: zmq.Context[Any], keys: CurveKeys) -> None:
        self._accepted = [b"CURVE", z85.decode(keys.public)]
        self._requests = context.socket(zmq.REP)
        self._requests.bind(_ZAP_ENDPOINT)
        self._stop = Wakeup(context)
        self._thread = threading.Thread(target=self._run, name="curve-guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the guard's thread. Safe to call twice."""
        self._stop.wake()
        self._thread.join()
        self._stop.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        with self._requests:
            poller.register(self._requests, zmq.POLLIN)
            poller.register(self._stop.socket, zmq.POLLIN)
            while self._stop.socket not in dict(poller.poll()):
                version, request_id, _domain, _address, _identity, *credentials = (
                    self._requests.recv_multipart()
                )
                verdict = (b"200", b"") if credentials == self._accepted else (b"400", b"unknown key")
                self._requests.send_multipart((version, request_id, *verdict, b"", b""))
