"""WorkerPool: processes that carry out one operation for the threads of a gateway, and are replaced if they end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from ....proto.errors import Overloaded, ReplicaUnavailable, ShuttingDown

# Until a worker is free.
QUEUE_TIMEOUT_S = 30.0
# Threads that wait for a worker; each holds a prompt of a user.
MAX_WAITING = 64
# For a process whose connection has ended to end too, and for one that was killed.
_END_TIMEOUT_S = 2.0


# Reads the answer to a task: None at the end of the connection. Raises TimeoutError or another OSError.
Receive = Callable[[socket.socket, float], Any]


class LimitExceeded(Exception):
    """The process that carried out a task ended: it needed more memory or processor time than it may use."""


class WorkerPool:
    """Processes of one operation. Threads may share one; calls block.

    Each process starts when it is needed. One that takes too long or ends is replaced. They end with `close`, or with
    this process.

    Args:
        operation: one of `__main__.OPERATIONS`.
        setup: what the operation needs, of its model.
        purpose: what the operation does, for errors: ``tokenize the prompt``.
    """

    def __init__(self, operation: str, setup: bytes, num_workers: int, purpose: str) -> None:
        self._purpose = purpose
        # In the memory of the machine once, however large the vocabulary is.
        descriptor = os.memfd_create(f"quire-{operation}")
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(setup)
        self._workers = [_Worker(operation, descriptor) for _ in range(num_workers)]
        # Last in, first out: the second process starts when two tasks come at once.
        self._idle = self._workers.copy()
        self._change = threading.Condition()
        self._num_waiting = 0
        self._is_closed = False
        self._end = weakref.finalize(self, _end_all, self._workers, descriptor)

    def start(self) -> None:
        """Start the first process, so that the first task does not wait for it. Returns at once."""
        with self._worker():
            pass

    def run(self, task: Any, timeout_s: float, receive: Receive | None = None) -> Any:
        """Return the answer to a task, from a second process if the first one is killed: no fault of the task.

        Args:
            receive: reads the answer from the connection; by default `receive_frame`.

        Raises:
            LimitExceeded: the task needs too much memory or processor time.
            Overloaded: no process is free in time.
            ReplicaUnavailable: the second process is killed as well.
            ShuttingDown: the pool was closed.
            TimeoutError: a process has not answered for `timeout_s`, and was ended.
        """
        for _ in range(2):
            with self._worker() as worker:
                answer = worker.run(task, timeout_s, receive or receive_frame)
            if answer is not None:
                return answer
            if not worker.was_killed:
                raise LimitExceeded
        raise ReplicaUnavailable(
            f"the process to {self._purpose} was killed twice; the machine may lack memory"
        )

    def close(self) -> None:
        """End the processes, with the calls that wait for them. Takes seconds at most; safe to call twice."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()
        self._end()

    @contextmanager
    def _worker(self) -> Iterator[_Worker]:
        """Take a running worker while the block runs."""
        with self._change:
            self._wait_for_idle()
            self._idle[-1].start()  # under the lock, so that `close` ends every process
            worker = self._idle.pop()
        try:
            yield worker
        finally:
            with self._change:
                self._idle.append(worker)
                self._change.notify()

    def _wait_for_idle(self) -> None:
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} calls wait already for a process to {self._purpose}")
        self._num_waiting += 1
        try:
            self._change.wait_for(lambda: self._idle or self._is_closed, QUEUE_TIMEOUT_S)
        finally:
            self._num_waiting -= 1
        if self._is_closed:
            raise ShuttingDown(f"the gateway stops, with its processes to {self._purpose}")
        if not self._idle:
            raise Overloaded(f"no process was free to {self._purpose} in {QUEUE_TIMEOUT_S:g} s")


class _Worker:
    """One process, or the place of one that is not running. Used by one thread at a time, beside `kill`.

    Attributes:
        was_killed: the last process that ended did so by SIGKILL, which was not sent by `run`.
    """

    def __init__(self, operation: str, descriptor: int) -> None:
        self._operation = operation
        self._setup = descriptor
        self._connection: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.was_killed = False

    def start(self) -> None:
        """Start the process unless it runs."""
        if self._connection is not None:
            return
        ours, theirs = socket.socketpair()
        descriptors = theirs.fileno(), self._setup
        path = os.pathsep.join(filter(None, sys.path))
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    __package__,
                    str(descriptors[0]),
                    self._operation,
                    str(descriptors[1]),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                env={**os.environ, "PYTHONPATH": path, "RAYON_NUM_THREADS": "1"},
            )
        self._connection = ours

    def run(self, task: Any, timeout_s: float, receive: Receive) -> Any:
        """Return the answer to a task; None if the process ended. Raises TimeoutError if the time is over."""
        assert self._connection is not None, "the worker was started"
        answer, grace_s = None, _END_TIMEOUT_S
        try:
            send_frame(self._connection, task, timeout_s)
            answer = receive(self._connection, timeout_s)
        except TimeoutError:
            grace_s = 0.0
            raise
        except OSError:
            pass
        finally:
            if answer is None:
                self._end(grace_s)
        return answer

    def kill(self) -> None:
        """Kill the process if one runs. A thread that waits for its answer receives none."""
        if self.process is not None:
            self.process.kill()

    def wait(self, timeout_s: float) -> None:
        """Wait until the process has ended, if one runs, or the time is over."""
        with suppress(subprocess.TimeoutExpired):
            if self.process is not None:
                self.process.wait(timeout_s)

    def _end(self, grace_s: float) -> None:
        """End the process, with some time for one whose connection has ended to end by itself."""
        connection, process = self._connection, self.process
        assert connection is not None, "the worker was started"
        assert process is not None, "the worker was started"
        connection.close()
        self._connection = None
        self.wait(grace_s)
        self.was_killed = process.returncode == -signal.SIGKILL
        self.kill()
        self.wait(_END_TIMEOUT_S)


def _end_all(workers: list[_Worker], descriptor: int) -> None:
    """Kill all processes at once: what they work on is lost with the gateway, and the compilers cannot be stopped."""
    for worker in workers:
        worker.kill()
    deadline = time.monotonic() + _END_TIMEOUT_S
    for worker in workers:
        worker.wait(max(0.0, deadline - time.monotonic()))
    os.close(descriptor)


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


@dataclass(frozen=True, slots=True)
class Bulk:
    """An answer of a value of msgpack and arrays, whose bytes follow it: no copy of them is made in between."""

    head: dict[str, Any]
    arrays: tuple[npt.NDArray[Any], ...] = ()


def send_bulk(connection: socket.socket, answer: Bulk) -> None:
    """Raises an OSError if the other end has gone."""
    head = msgpack.packb((answer.head, sum(array.nbytes for array in answer.arrays)))
    connection.sendall(len(head).to_bytes(8, "little") + head)
    for array in answer.arrays:
        connection.sendall(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def receive_bulk(
    connection: socket.socket, timeout_s: float
) -> tuple[dict[str, Any], npt.NDArray[np.uint8]] | None:
    """Return the head of the next Bulk and the bytes of its arrays; None at the end of the connection."""
    deadline = time.monotonic() + timeout_s
    size = _receive_exactly(connection, 8, deadline)
    if size is None:
        return None
    packed = _receive_exactly(connection, int.from_bytes(size.tobytes(), "little"), deadline)
    if packed is None:
        return None
    head, num_bytes = msgpack.unpackb(packed.tobytes())
    data = _receive_exactly(connection, num_bytes, deadline)
    return None if data is None else (head, data)


def _receive_exactly(
    connection: socket.socket, num_bytes: int, deadline: float
) -> npt.NDArray[np.uint8] | None:
    found, start = np.empty(num_bytes, np.uint8), 0
    while start < num_bytes:
        if (left_s := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        count = connection.recv_into(found[start:].data)
        if not count:
            return None
        start += count
    return found
