"""Frames between a gateway and its text workers: four bytes of length, then msgpack."""

from __future__ import annotations

import socket
import time
from typing import Any

import msgpack

_LENGTH_BYTES = 4


def send_frame(connection: socket.socket, message: dict[str, Any], timeout_s: float | None = None) -> None:
    """Raises TimeoutError, or another OSError if the other end has gone."""
    packed: bytes = msgpack.packb(message)
    connection.settimeout(timeout_s)
    connection.sendall(len(packed).to_bytes(_LENGTH_BYTES, "little") + packed)


def receive_frame(connection: socket.socket, timeout_s: float | None = None) -> dict[str, Any] | None:
    """Return the next message; None at the end of the connection. Raises TimeoutError or another OSError."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    head = _receive(connection, _LENGTH_BYTES, deadline)
    body = head and _receive(connection, int.from_bytes(head, "little"), deadline)
    return msgpack.unpackb(body) if body else None


def _receive(connection: socket.socket, num_bytes: int, deadline: float | None) -> bytes | None:
    pieces, num_missing = [], num_bytes
    while num_missing:
        if deadline is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            connection.settimeout(left_s)
        else:
            connection.settimeout(None)
        piece = connection.recv(min(num_missing, 1 << 20))
        if not piece:
            return None
        pieces.append(piece)
        num_missing -= len(piece)
    return b"".join(pieces)
