"""Caller: a minimal gateway, for tests of a replica's socket."""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq

from quire.cluster.os_utils.closing import Closing
from quire.proto.stream import Finish, GatewayMessage, ReplicaMessage, TokenBatch, decode, encode
from quire.proto.transport.network import CurveKeys, connect


@dataclass
class Output:
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None


class Caller(Closing):
    """Connection to one scheduler. For one thread."""

    def __init__(self, endpoint: str, keys: CurveKeys | None = None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        connect(self._socket, endpoint, keys)

    def send(self, message: GatewayMessage) -> None:
        self._socket.send(encode(message))

    def receive(self, timeout_s: float) -> ReplicaMessage | None:
        """Return the next message, or None if none came in time."""
        if not self._socket.poll(round(1000 * timeout_s)):
            return None
        message = decode(self._socket.recv())
        assert not isinstance(message, GatewayMessage)
        return message

    def follow(self, *handles: int, timeout_s: float = 60.0) -> dict[int, Output]:
        """Receive until all sequences have ended; each message may take `timeout_s`.

        Returns:
            handle |-> its tokens and finish.
        """
        outputs = {handle: Output() for handle in handles}
        while not all(output.finish for output in outputs.values()):
            batch = self.receive(timeout_s)
            assert batch is not None, f"no message in {timeout_s:g} s"
            if isinstance(batch, TokenBatch):
                for handle, token_id in zip(batch.handles.tolist(), batch.token_ids.tolist(), strict=True):
                    outputs.get(handle, Output()).token_ids.append(token_id)
                for finish in batch.finished:
                    outputs.get(finish.handle, Output()).finish = finish
        return outputs

    def close(self) -> None:
        self._context.destroy(linger=0)
