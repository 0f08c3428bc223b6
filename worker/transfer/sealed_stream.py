"""SealedStream: frames over a TCP connection, encrypted and authenticated with AES-GCM.

Both ends have the key from a channel that is encrypted already. ZeroMQ's CURVE encrypts 0.2 GB/s on a core of Zen 4,
AES-GCM 10. Frames of each direction are numbered, and their number is the nonce, so that none can be left out,
repeated or exchanged. A key is for one connection.
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
_TAG_BYTES = 16
_WAKE_UP_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")
_NONCE = struct.Struct("<IQ")


class SealedStream:
    """One end of a connection. For one thread.

    Args:
        connection: is closed with the stream.
        key: of this connection alone.
        is_server: which of the two ends this is.
        max_bytes: of a frame that is accepted.
    """

    def __init__(self, connection: socket.socket, key: bytes, *, is_server: bool, max_bytes: int) -> None:
        self._socket, self._cipher, self._max_bytes = connection, AESGCM(key), max_bytes
        self._sides = (1, 0) if is_server else (0, 1)  # of what is sent, and of what is received
        self._num_sent = self._num_received = 0
        self._outgoing, self._incoming, self._content = bytearray(), bytearray(), bytearray()
        self._num_bytes = 0  # of the frame that is being received
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, content: bytes | memoryview, timeout_s: float) -> None:
        """Send a frame.

        Raises:
            OSError: the connection has ended, or the other end does not read.
        """
        length = len(content) + _TAG_BYTES
        if len(self._outgoing) < _LENGTH.size + length:
            self._outgoing = bytearray(_LENGTH.size + length)
        frame = memoryview(self._outgoing)[: _LENGTH.size + length]
        _LENGTH.pack_into(frame, 0, length)
        nonce = _NONCE.pack(self._sides[0], self._num_sent)
        self._cipher.encrypt_into(nonce, content, frame[: _LENGTH.size], frame[_LENGTH.size :])
        self._num_sent += 1
        self._socket.settimeout(timeout_s)
        self._socket.sendall(frame)

    def receive(self, timeout_s: float) -> memoryview | None:
        """Return the next frame, valid until the next call. Returns None if it has not arrived in time.

        Raises:
            OSError: the connection has ended.
            ValueError: a frame is not what the other end sent.
        """
        deadline = time.monotonic() + timeout_s
        if not self._fill(_LENGTH.size, deadline):
            return None
        (length,) = _LENGTH.unpack_from(self._incoming)
        if not _TAG_BYTES <= length <= self._max_bytes + _TAG_BYTES:
            raise ValueError(f"a frame has {length} bytes, must have {_TAG_BYTES} to {self._max_bytes}")
        if not self._fill(_LENGTH.size + length, deadline):
            return None
        if len(self._content) < length - _TAG_BYTES:
            self._content = bytearray(length - _TAG_BYTES)
        frame, content = memoryview(self._incoming)[: _LENGTH.size + length], memoryview(self._content)
        nonce = _NONCE.pack(self._sides[1], self._num_received)
        try:
            self._cipher.decrypt_into(
                nonce, frame[_LENGTH.size :], frame[: _LENGTH.size], content[: length - _TAG_BYTES]
            )
        except InvalidTag:
            raise ValueError("a frame is not what the other end sent") from None
        self._num_received += 1
        self._num_bytes = 0
        return content[: length - _TAG_BYTES]

    def close(self) -> None:
        """Close the connection; another thread that sends or receives gets an OSError. Safe to call twice."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _fill(self, num_bytes: int, deadline: float) -> bool:
        """Receive until the frame has so many bytes; return whether it has them in time."""
        if len(self._incoming) < num_bytes:
            self._incoming.extend(bytes(num_bytes - len(self._incoming)))
        while self._num_bytes < num_bytes:
            # One wake-up per MiB and not per packet: on a busy machine each costs a turn of other processes.
            self._socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(num_bytes - self._num_bytes, _WAKE_UP_BYTES)
            )
            self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            try:
                with memoryview(self._incoming) as whole:
                    count = self._socket.recv_into(whole[self._num_bytes : num_bytes])
            except TimeoutError:
                return False
            if not count:
                raise ConnectionResetError("the other end has closed the connection")
            self._num_bytes += count
        return True
