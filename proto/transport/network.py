"""How ZeroMQ sockets meet: ipc on one host, tcp with CURVE between hosts.

An ipc socket lies in a directory that only its owner may enter, and needs no key. Over tcp a fleet has one keypair
(CurveZMQ, ZeroMQ RFC 26): everything is encrypted, a client speaks to nobody but a holder of the keypair, and a
server hears nobody else (`CurveGuard`). Heartbeats, by ZeroMQ's own thread, end the connection of a host that has
vanished without a word.
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
# Shorter than a step's usual deadline, longer than a network's usual hiccup: what is on its way when a connection
# ends is lost.
_SILENCE_MS = 30_000
_HANDSHAKE_MS = 10_000
_RECONNECT_MS = 100
_MAX_RECONNECT_MS = 5_000
# Where ZeroMQ asks whether a client may speak (RFC 27).
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A fleet's keypair, in Z85. It lives in the memory of the fleet's processes and nowhere else."""

    public: bytes
    secret: bytes = field(repr=False)

    @staticmethod
    def generate() -> CurveKeys:
        """A new keypair.

        Raises:
            ConfigError: this machine's ZeroMQ was built without CURVE.
        """
        if not zmq.has("curve"):
            raise ConfigError(
                "this machine's ZeroMQ library has no CURVE, which speaking between hosts needs"
            )
        return CurveKeys(*zmq.curve_keypair())


def tcp_endpoint(host: str) -> str:
    """Where to bind on that address, at a port that the system chooses."""
    return f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"


def bind(socket: zmq.Socket[Any], endpoint: str, keys: CurveKeys | None) -> str:
    """Binds a socket, over tcp as a CURVE server; returns the endpoint with the port that the system chose.

    The context of a tcp server must have a `CurveGuard`.
    """
    if endpoint.startswith("tcp://"):
        assert keys is not None, "tcp without keys would hear anybody"
        _set_up_tcp(socket, endpoint)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.bind(endpoint)
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.rstrip(b"\0").decode()


def connect(socket: zmq.Socket[Any], endpoint: str, keys: CurveKeys | None) -> None:
    """Connects a socket, over tcp as a CURVE client. Returns at once; ZeroMQ tries until it succeeds."""
    if endpoint.startswith("tcp://"):
        assert keys is not None, "tcp without keys would speak to anybody"
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
    """Admits to a context's CURVE servers the holders of one keypair: ZeroMQ's authentication protocol, RFC 27.

    Without it a server would hear every client that knows its public key. Make it before the servers are bound, and
    close it before the context is destroyed.
    """

    def __init__(self, context: zmq.Context[Any], keys: CurveKeys) -> None:
        self._admitted = [b"CURVE", z85.decode(keys.public)]
        self._requests = context.socket(zmq.REP)
        self._requests.bind(_ZAP_ENDPOINT)
        self._stop = Wakeup(context)
        self._thread = threading.Thread(target=self._answer, name="curve-guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Safe to call twice."""
        self._stop.wake()
        self._thread.join()
        self._stop.close()

    def _answer(self) -> None:
        poller = zmq.Poller()
        with self._requests:
            poller.register(self._requests, zmq.POLLIN)
            poller.register(self._stop.socket, zmq.POLLIN)
            while self._stop.socket not in dict(poller.poll()):
                version, request_id, _domain, _address, _identity, *credentials = (
                    self._requests.recv_multipart()
                )
                verdict = (b"200", b"") if credentials == self._admitted else (b"400", b"unknown key")
                self._requests.send_multipart((version, request_id, *verdict, b"", b""))
