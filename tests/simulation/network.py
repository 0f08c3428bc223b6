"""A simulated network: connections with delays, partitions and losses."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from hashlib import blake2b

from benchmarks.in_memory import ReceivedFrames
from quire.proto.errors import ReplicaUnavailable

# Delays of a message, in seconds.
USUAL_DELAY_S = 0.0005, 0.003
# A broken connection is made again after this time.
RECONNECT_S = 0.1


class EventLog:
    """The events of a run in order. Equal runs have equal logs, to the byte.

    Args:
        write: called with each line; None to keep the digest alone.
    """

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self._digest, self._write = blake2b(digest_size=16), write
        self.num_events = 0

    def add(self, at: float, event: str) -> None:
        line = f"{at!r} {event}\n"
        self._digest.update(line.encode())
        self.num_events += 1
        if self._write is not None:
            self._write(line)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


class Network:
    """Links between named processes.

    Attributes:
        log: has every delivery.
        num_messages: frames that were delivered.
    """

    def __init__(self, rng: random.Random, log: EventLog) -> None:
        self._rng = rng
        self._partitions: set[frozenset[str]] = set()
        self._slow: dict[str, float] = {}  # process |-> its further delay
        self._connections: list[SimulatedConnection] = []
        self._healed = asyncio.Event()
        self._num_connections = 0
        self.log = log
        self.num_messages = 0

    def next_identity(self) -> bytes:
        self._num_connections += 1
        return f"connection-{self._num_connections}".encode()

    def register(self, connection: SimulatedConnection) -> None:
        self._connections.append(connection)

    def delay_s(self, one: str, other: str) -> float:
        return self._rng.uniform(*USUAL_DELAY_S) + self._slow.get(one, 0.0) + self._slow.get(other, 0.0)

    def are_apart(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._partitions

    def is_partitioned(self, name: str) -> bool:
        """Return whether the process is apart from any other."""
        return any(name in pair for pair in self._partitions)

    def partition(self, one: str, other: str) -> None:
        self._partitions.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        """End a partition: what was sent meanwhile is delivered, as by TCP."""
        self._partitions.discard(frozenset((one, other)))
        healed, self._healed = self._healed, asyncio.Event()
        healed.set()

    async def wait_for_heal(self) -> None:
        await self._healed.wait()

    def slow_down(self, name: str, delay_s: float) -> None:
        """Delay every message of a process from now on; 0 ends it."""
        self._slow[name] = delay_s

    def reset(self, name: str, rng: random.Random) -> None:
        """Break one connection of a process: what is on its way is lost."""
        own = [each for each in self._connections if each.is_open and name in (each.client, each.server.name)]
        if own:
            rng.choice(own).break_off()

    def break_all(self, server: Server) -> None:
        """Break the connections to a process that has ended."""
        for connection in self._connections:
            if connection.server is server:
                connection.break_off()
        self._connections = [each for each in self._connections if each.server is not server]

    def forget(self, connection: SimulatedConnection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)

    async def call(self, client: str, server: str) -> None:
        """Take the time of one message of a call. Raises ReplicaUnavailable if the two are apart."""
        await asyncio.sleep(self.delay_s(client, server))
        if self.are_apart(client, server):
            await asyncio.sleep(1.0)
            raise ReplicaUnavailable(f"{server} does not answer {client}")


class Server:
    """The end of connections at a process that is connected to.

    Attributes:
        is_up: the process runs.
        on_frame: receives (identity of the connection, frame).
    """

    def __init__(self, name: str, on_frame: Callable[[bytes, bytes], None]) -> None:
        self.name = name
        self.is_up = True
        self.on_frame = on_frame
        self.peers: dict[bytes, SimulatedConnection] = {}  # identity |-> connection

    def send(self, identity: bytes, frame: bytes) -> bool:
        """Send to a connection; return False if it is gone."""
        connection = self.peers.get(identity)
        if connection is None:
            return False
        connection.carry_back(identity, frame)
        return True


class _Pipe:
    """One direction of a connection: in order, and held up while the two ends are apart."""

    def __init__(
        self, network: Network, one: str, other: str, deliver: Callable[[bytes, bytes], None]
    ) -> None:
        self._network = network
        self._ends = one, other
        self._deliver = deliver
        self._frames: deque[tuple[float, bytes, bytes]] = deque()  # (time, identity, frame)
        self._last_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def push(self, identity: bytes, frame: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._last_at = max(self._last_at, loop.time() + self._network.delay_s(*self._ends))
        self._frames.append((self._last_at, identity, frame))
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run())

    def clear(self) -> None:
        self._frames.clear()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._frames:
            at, identity, frame = self._frames[0]
            if at > loop.time():
                await asyncio.sleep(at - loop.time())
                continue
            if self._network.are_apart(*self._ends):
                await self._network.wait_for_heal()
                continue
            self._frames.popleft()
            self._network.num_messages += 1
            self._network.log.add(loop.time(), f"{'/'.join(self._ends)} {identity.decode()} {frame.hex()}")
            self._deliver(identity, frame)


class SimulatedConnection(ReceivedFrames):
    """See `cluster.replica.connection.Connection`: a DEALER's connection to a ROUTER."""

    def __init__(self, network: Network, client: str, server: Server) -> None:
        super().__init__()
        self.client = client
        self.server = server
        self.is_open = False
        self._network = network
        self._identity = b""
        self._out = _Pipe(network, client, server.name, self._arrive_at_server)
        self._back = _Pipe(network, client, server.name, self._arrive_at_client)
        self._unsent: list[bytes] = []  # sent while there was no connection
        self._lost = asyncio.Event()

    def open(self) -> None:
        """See `Connection`."""
        self.is_open = True
        self._network.register(self)
        self._connect()

    def _connect(self) -> None:
        if not self.is_open or not self.server.is_up:
            return
        self._identity = self._network.next_identity()
        self.server.peers[self._identity] = self
        for frame in self._unsent:
            self._out.push(self._identity, frame)
        self._unsent = []

    def send(self, frame: bytes) -> None:
        """See `Connection`."""
        if self._identity:
            self._out.push(self._identity, frame)
        else:
            self._unsent.append(frame)

    async def wait_until_lost(self) -> None:
        """See `Connection`."""
        await self._lost.wait()
        self._lost.clear()
        while self._received:
            await asyncio.sleep(0.0001)

    async def close(self, linger_ms: int) -> None:
        """See `Connection`. What was sent before still arrives."""
        self.is_open = False
        self._network.forget(self)
        await asyncio.sleep(linger_ms / 1000)
        self.server.peers.pop(self._identity, None)

    def break_off(self) -> None:
        """Lose the connection with what is on its way; it is made again under another identity."""
        if not self._identity:
            return
        self.server.peers.pop(self._identity, None)
        self._identity = b""
        self._out.clear()
        self._back.clear()
        self._lost.set()
        if self.is_open:
            asyncio.get_running_loop().call_later(RECONNECT_S, self._connect)

    def carry_back(self, identity: bytes, frame: bytes) -> None:
        """Carry a frame of the server to the client."""
        self._back.push(identity, frame)

    def _arrive_at_server(self, identity: bytes, frame: bytes) -> None:
        if self.server.is_up:
            self.server.on_frame(identity, frame)

    def _arrive_at_client(self, identity: bytes, frame: bytes) -> None:
        self._arrive(frame)
