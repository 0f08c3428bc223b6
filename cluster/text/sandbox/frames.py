"""Frames between a gateway and its worker processes: one value of msgpack for each task, and one for its answer."""

from __future__ import annotations

import socket
import time
from typing import Any

import msgpack


def send_frame(connection: socket.socket, message: Any, timeout_s: float | None = None) -> None:
    """Raises TimeoutError, or another OSError if the other end has gone."""
    connection.settimeout(timeout_s)
    connection.sendall(msgpack.packb(message))


def receive_frame(connection: socket.socket, timeout_s: float | None = None) -> Any:
    """Return the next message; None at the end of the connection. Raises TimeoutError or another OSError."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    unpacker = msgpack.Unpacker()
    while True:
        if deadline is not None and (timeout_s := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(timeout_s)
        piece = connection.recv(1 << 20)
        if not piece:
            return None
        unpacker.feed(piece)
        for message in unpacker:
            return message
