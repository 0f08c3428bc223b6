"""StepChannel: broadcasts each plan to every rank and receives their replies. No step travels through Ray.

`StepSender` is the scheduler's end, `StepReceiver` a rank's. Both are ZeroMQ sockets (PUB and SUB for plans, PUSH and
PULL for replies), over ipc on one host and tcp between hosts (see `network`). 16 KB to two ranks and back takes
0.16 to 0.25 ms over ipc on two cores; a Ray actor call takes 2.3 ms.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..errors import ReplicaUnavailable
from .network import CurveGuard, CurveKeys, bind, connect, tcp_endpoint
from .wakeup import Wakeup

_HELLO = b"hello"
_END = b"end"
_GREETING_INTERVAL_MS = 20
# Frames of this size are not copied to be sent; a smaller one is copied in less time than it takes to share it.
_SHARED_BYTES = 1 << 16
# A rank without a tcp connection to its scheduler for this long ends. Over ipc both are on one host.
_LOST_S = 60.0


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Endpoints of a channel's two sockets, before or after binding.

    Attributes:
        plans: endpoint that ranks subscribe to.
        replies: endpoint that ranks push to.
        keys: CURVE keys of tcp endpoints; None for ipc endpoints.
    """

    plans: str
    replies: str
    keys: CurveKeys | None = None

    @staticmethod
    def in_directory(directory: Path) -> ChannelAddress:
        """Return an ipc address in a directory that only its owner may enter and whose path has at most 80 bytes."""
        name = f"{os.getpid()}-{time.monotonic_ns():x}"
        return ChannelAddress(f"ipc://{directory}/{name}.plans", f"ipc://{directory}/{name}.replies")

    @staticmethod
    def on_host(host: str, keys: CurveKeys) -> ChannelAddress:
        """Return a tcp address, at ports that the system chooses when the sender binds."""
        return ChannelAddress(tcp_endpoint(host), tcp_endpoint(host), keys)

    def of_epoch(self, epoch: int) -> ChannelAddress:
        """Return an unbound address for another life of the channel; over tcp the system chooses new ports."""
        if self.keys is not None:
            return self
        return ChannelAddress(f"{self.plans}.{epoch}", f"{self.replies}.{epoch}")


class StepSender:
    """The scheduler's end: binds, waits for the ranks, broadcasts frames and receives replies.

    Attributes:
        address: the bound endpoints, for the ranks.
    """

    def __init__(self, address: ChannelAddress, num_ranks: int) -> None:
        self._missing = set(range(num_ranks))
        self._context = zmq.Context()
        self._guard = None if address.keys is None else CurveGuard(self._context, address.keys)
        self._plans = self._context.socket(zmq.PUB)
        self._replies = self._context.socket(zmq.PULL)
        self._interrupt = Wakeup(self._context)
        self._poller = zmq.Poller()
        self._poller.register(self._replies, zmq.POLLIN)
        self._poller.register(self._interrupt.socket, zmq.POLLIN)
        # Bounded by max_steps_in_flight, not by a high-water mark: a dropped plan would hang the ranks.
        self._plans.setsockopt(zmq.SNDHWM, 0)
        self._replies.setsockopt(zmq.RCVHWM, 0)
        self.address = address
        try:
            plans = bind(self._plans, address.plans, address.keys)
            replies = bind(self._replies, address.replies, address.keys)
        except zmq.ZMQError:
            self.close()
            raise
        self.address = ChannelAddress(plans, replies, address.keys)

    def wait_for_ranks(self, timeout_s: float) -> None:
        """Wait until every rank receives this sender's frames, or until interrupted.

        Raises:
            ReplicaUnavailable: a rank did not join in time; names all such ranks.
        """
        deadline = time.monotonic() + timeout_s
        while self._missing:
            if time.monotonic() > deadline:
                raise ReplicaUnavailable(
                    f"ranks {sorted(self._missing)} did not join the channel in {timeout_s:.0f} s"
                )
            # A frame sent before a rank's subscription arrives is lost, so repeat until each rank has replied.
            self._plans.send(_HELLO)
            ready = dict(self._poller.poll(_GREETING_INTERVAL_MS))
            if self._interrupt.socket in ready:
                self._interrupt.clear()
                return
            if not ready:
                continue
            reply = bytes(self._replies.recv())
            self._missing.discard(int.from_bytes(reply[len(_HELLO) :], "little"))

    def send(self, frame: bytes) -> None:
        """Broadcast one frame to every rank without blocking."""
        if len(frame) < _SHARED_BYTES:
            self._plans.send(frame)
        else:
            self._plans.send(frame, copy=False)

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next reply of any rank, or None after `timeout_s` or when interrupted."""
        ready = dict(self._poller.poll(max(0, round(timeout_s * 1000))))
        if self._interrupt.socket in ready:
            self._interrupt.clear()
            return None
        return bytes(self._replies.recv()) if ready else None

    def interrupt(self) -> None:
        """Make the waiting `receive`, or the next one, return None. For any thread; does nothing once closed."""
        self._interrupt.wake()

    def close(self, linger_s: float = 0.5) -> None:
        """End the ranks and close; wait at most `linger_s` for frames to be sent. Safe to call twice."""
        if self._context.closed:
            return
        self._interrupt.close()
        self._plans.send(_END)
        if self._guard is not None:
            self._guard.close()
        self._context.destroy(linger=round(linger_s * 1000))
        for endpoint in (self.address.plans, self.address.replies):
            if endpoint.startswith("ipc://"):
                Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


class StepReceiver:
    """A rank's end: receives the frames in order and replies.

    Args:
        lost_s: over tcp, seconds without a connection after which `receive` fails.
    """

    def __init__(self, address: ChannelAddress, rank: int, lost_s: float = _LOST_S) -> None:
        self._rank = rank
        self._lost_s = lost_s
        self._endpoint = address.plans
        self._context = zmq.Context()
        self._interrupt = Wakeup(self._context)
        self._plans = self._context.socket(zmq.SUB)
        self._plans.setsockopt(zmq.RCVHWM, 0)
        self._plans.setsockopt(zmq.SUBSCRIBE, b"")
        self._poller = zmq.Poller()
        self._poller.register(self._plans, zmq.POLLIN)
        self._poller.register(self._interrupt.socket, zmq.POLLIN)
        self._connection_events = self._watch_connection() if address.keys is not None else None
        self._lost_at: float | None = time.monotonic()  # when the connection was lost; None while connected
        connect(self._plans, address.plans, address.keys)
        self._replies = self._context.socket(zmq.PUSH)
        self._replies.setsockopt(zmq.SNDHWM, 0)
        connect(self._replies, address.replies, address.keys)
        self._greeted = self._is_interrupted = False

    def receive(self) -> bytes | None:
        """Return the next frame, or None if the sender has closed or after `interrupt`. Replies to greetings.

        Blocks without a deadline while there is no work: an idle rank uses no CPU, and its launcher ends it.

        Raises:
            ReplicaUnavailable: over tcp, there was no connection to the scheduler for `lost_s`.
        """
        while True:
            if not self._wait_for_frame():
                return None
            frame = bytes(self._plans.recv())
            if frame == _END:
                return None
            if frame != _HELLO:
                return frame
            if not self._greeted:
                self._replies.send(_HELLO + self._rank.to_bytes(2, "little"))
                self._greeted = True

    def interrupt(self) -> None:
        """Make the waiting `receive`, or the next one, return None. For any thread; does nothing once closed."""
        self._is_interrupted = True
        self._interrupt.wake()

    def _watch_connection(self) -> zmq.Socket[bytes]:
        events = self._plans.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._poller.register(events, zmq.POLLIN)
        return events

    def _wait_for_frame(self) -> bool:
        """Wait for a frame; return False after `interrupt`. Raises ReplicaUnavailable; see `receive`."""
        while not self._plans.poll(0):
            events = dict(self._poller.poll(self._patience_ms()))
            if self._interrupt.socket in events:
                return False
            if self._connection_events is not None and self._connection_events in events:
                event = recv_monitor_message(self._connection_events)["event"]
                self._lost_at = None if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else time.monotonic()
        return True

    def _patience_ms(self) -> int | None:
        """Return how long a connection may still be lost; None while there is one. Raises ReplicaUnavailable."""
        if self._connection_events is None or self._lost_at is None:
            return None
        remaining_s = self._lost_at + self._lost_s - time.monotonic()
        if remaining_s <= 0:
            raise ReplicaUnavailable(
                f"rank {self._rank} has not reached the scheduler at {self._endpoint} for {self._lost_s:g} s"
            )
        return round(1000 * remaining_s) + 1

    def reply(self, frame: bytes) -> None:
        self._replies.send(frame)

    def close(self, linger_s: float = 1.0) -> None:
        """Close; wait at most `linger_s` for replies to be sent, unless `interrupt` was called.

        A rank is interrupted when its sender has closed. A sender that has ended leaves subscriptions that cannot be
        sent, for which a lingering socket would wait.
        """
        if self._connection_events is not None:
            self._plans.disable_monitor()
        self._plans.close(linger=0)
        if self._is_interrupted:
            linger_s = 0.0
        self._interrupt.close()
        self._context.destroy(linger=round(linger_s * 1000))
