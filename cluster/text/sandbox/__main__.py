"""A worker process: carries out one operation for the gateway that started it, until its connection ends.

Arguments: the connection's file descriptor, the operation's name, and the file descriptor of its setup.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
from collections.abc import Mapping

from .worker_pool import Bulk, receive_frame, send_bulk, send_frame

# Operation |-> its module, which imports what the operation needs. `prepare(setup)` returns the operation, a function
# from a task to its answer, both values of msgpack; an answer may also be a Bulk, if each of the operation's is.
OPERATIONS: Mapping[str, str] = {
    "compile": ".compiling",
    "process image": ".image_processing",
    "tokenize": ".tokenizing",
}
# Running streams of the gateway come first.
_NICENESS = 5


def main(connection: socket.socket, operation: str, setup: bytes) -> None:
    for number in signal.SIGINT, signal.SIGTERM:  # for the gateway, which ends this process when it stops
        signal.signal(number, signal.SIG_IGN)
    carry_out = importlib.import_module(OPERATIONS[operation], __package__).prepare(setup)
    os.nice(_NICENESS)
    while (task := receive_frame(connection)) is not None:
        answer = carry_out(task)
        if isinstance(answer, Bulk):
            send_bulk(connection, answer)
        else:
            send_frame(connection, answer)


def _content(descriptor: int) -> bytes:
    """Return all bytes of a file, which processes share: its position stays."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], _content(int(sys.argv[3])))
