"""ReplicaPool: one model's replicas as one gateway sees them. It decides who gets a request, and holds what waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ...proto.errors import Overloaded, QuireError, ReplicaUnavailable
from ...proto.stream import CacheQuery, CacheReport, ReplicaStatus
from ...scheduler.kv.prefix_cache import prefix_hashes
from ..controller_api.demand import Demand
from ..host.background import run_in_background
from ..host.change_notifier import ChangeNotifier
from ..replica.canary import run_canary
from ..replica.client import ReplicaClient
from ..requests.request import Request
from .request_migration import MigratingRequest
from .router import ReplicaLoad, Router

CANARY_TIMEOUT_S = 60.0
CANARY_RETRY_S = 1.0
# Of prompts without a cached beginning, what a router could find is looked for in so many blocks.
MAX_HASHED_BLOCKS = 4096

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Member:
    """A replica that the pool knows.

    Attributes:
        is_ready: a canary has come through all its ranks to this gateway since it last had a problem.
        is_draining: its owner wants it empty.
        cache_version: of its prefix cache, as far as the router knows it.
        sent_tokens: prompt tokens to compute that were handed to it since its last status.
    """

    client: ReplicaClient
    is_ready: bool = False
    is_draining: bool = False
    cache_version: int = 0
    sent_tokens: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """It can be given a request."""
        status = self.client.latest
        drains = self.is_draining or (status is not None and status.draining)
        return self.is_ready and not drains and not self.client.problem

    @property
    def load(self) -> ReplicaLoad:
        status = self.client.latest
        assert status is not None, "a replica that is ready has told its status"
        return ReplicaLoad(queued_tokens=status.queued_tokens + self.sent_tokens, kv_use=status.kv_use)


class ReplicaPool:
    """Runs requests on the replicas that it is told of. For one event loop.

    Args:
        model: the name that the replicas serve.
        block_size: tokens a KV block.
        is_fixed: nobody will bring another replica: a request without one fails at once, and one whose replica
            failed fails with it. Otherwise requests wait for replicas, and go on at others.
        max_waiting: requests that may wait for a replica.
        max_wait_s: how long each may.
        on_demand: called when a request begins to wait.
        on_change: called when what can be told of the pool may have changed.
        explain: why there is no replica, for those that waited in vain.
    """

    def __init__(
        self,
        model: str,
        block_size: int,
        *,
        is_fixed: bool,
        max_waiting: int = 4096,
        max_wait_s: float = 600.0,
        on_demand: Callable[[], None] = lambda: None,
        on_change: Callable[[], None] = lambda: None,
        explain: Callable[[], str] = lambda: "",
    ) -> None:
        self.model = model
        self.is_fixed = is_fixed
        self.max_waiting = max_waiting
        self.max_wait_s = max_wait_s
        self._block_size = block_size
        self._on_demand = on_demand
        self._on_change = on_change
        self._explain = explain
        self._members: dict[str, _Member] = {}
        self._router = Router(block_size)
        self._num_requests = self._num_tokens = 0
        self._num_waiting = self._num_waiting_tokens = 0
        self._changes = ChangeNotifier()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def is_ready(self) -> bool:
        """A request would be handed to a replica at once."""
        return any(member.is_open for member in self._members.values())

    @property
    def clients(self) -> Mapping[str, ReplicaClient]:
        """replica_id |-> the line to it."""
        return {replica_id: member.client for replica_id, member in self._members.items()}

    def why_closed(self, replica_id: str) -> str:
        """Why the replica is given no requests; empty where it is."""
        member = self._members.get(replica_id)
        if member is None:
            return "it is gone"
        if member.is_open:
            return ""
        return "it drains" if member.is_draining else "no canary token has come through all ranks yet"

    def add(self, client: ReplicaClient) -> None:
        """A replica, its client started. It gets requests once a canary token has come back from it."""
        member = _Member(client)
        self._members[client.replica_id] = member
        client.listen(lambda message: self._hear(member, message))
        member.tasks = [
            run_in_background(self._keep_ready(member), f"proving {client.replica_id}"),
            run_in_background(self._tell_failures(client), f"watching {client.replica_id}"),
        ]

    def drain(self, replica_id: str) -> None:
        """The replica gets no more requests; what runs there goes on until the replica gives it back."""
        member = self._members.get(replica_id)
        if member is not None and not member.is_draining:
            member.is_draining = True
            self._note_change()

    def retire(self) -> None:
        """The model is served no longer: nobody will bring a replica any more."""
        self.is_fixed = True
        self._note_change()

    def remove(self, replica_id: str, reason: str) -> None:
        """The replica is gone, or will be: what still runs there goes on elsewhere."""
        member = self._members.pop(replica_id)
        self._router.forget(replica_id)
        closing = run_in_background(self._close(member, reason), f"closing the line to {replica_id}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Ends what still runs."""
        for replica_id in list(self._members):
            self.remove(replica_id, "its gateway was closed")
        await asyncio.gather(*self._closing)

    def submit(self, request: Request) -> MigratingRequest:
        """Runs the request.

        Raises:
            Overloaded: too many requests wait for a replica already.
            ReplicaUnavailable: there is no replica, and none will come.
        """
        self._num_requests += 1
        self._num_tokens += len(request.prompt_token_ids)
        if not self.is_ready:
            self._check_can_wait()
        running = MigratingRequest(request, self)
        running.start()
        return running

    def take_demand(self) -> Demand:
        """What has come since the last call."""
        demand = Demand(self._num_requests, self._num_tokens, self._num_waiting, self._num_waiting_tokens)
        self._num_requests = self._num_tokens = 0
        return demand

    def choose(self, request: Request) -> ReplicaClient | None:
        """See `Places`."""
        candidates = {name: member for name, member in self._members.items() if member.is_open}
        if not candidates:
            return None
        num_cached_tokens = 0
        if len(candidates) == 1:  # nothing to choose by
            (replica_id,) = candidates
        else:
            hashes = self._hashes(request)
            loads = {name: member.load for name, member in candidates.items()}
            replica_id = self._router.choose(hashes, request.salt, loads)
            num_cached_tokens = self._block_size * self._router.match(replica_id, hashes)
            self._router.note_submit(replica_id, hashes)
        candidates[replica_id].sent_tokens += len(request.prompt_token_ids) - num_cached_tokens
        return candidates[replica_id].client

    async def wait_for_replica(self, request: Request, timeout_s: float | None) -> ReplicaClient:
        """See `Places`. What runs already waits beyond the bound, too."""
        wait_s = self.max_wait_s if timeout_s is None else min(timeout_s, self.max_wait_s)
        self._num_waiting += 1
        self._num_waiting_tokens += len(request.prompt_token_ids)
        self._on_demand()
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    if (client := self.choose(request)) is not None:
                        return client
                    self._check_can_come()
                    await self._changes.wait()
        except TimeoutError:
            why = self._explain()
            reason = f"no replica of {self.model} was ready in {wait_s:.0f} s" + (f": {why}" if why else "")
            raise ReplicaUnavailable(reason) from None
        finally:
            self._num_waiting -= 1
            self._num_waiting_tokens -= len(request.prompt_token_ids)

    def _check_can_wait(self) -> None:
        self._check_can_come()
        if self._num_waiting >= self.max_waiting:
            raise Overloaded(
                f"no replica of {self.model} is ready, and {self._num_waiting} requests wait for one already"
            )

    def _check_can_come(self) -> None:
        """Raises ReplicaUnavailable where no replica can become ready."""
        if self.is_fixed and all(
            member.client.has_failed or member.is_draining for member in self._members.values()
        ):
            problems = [member.client.problem for member in self._members.values()]
            raise ReplicaUnavailable(
                "; ".join(filter(None, problems)) or f"no replica of {self.model} takes requests"
            )

    def _hashes(self, request: Request) -> list[bytes]:
        tokens = request.prompt_token_ids
        if len(request.generated_token_ids):
            tokens = np.concatenate([tokens, request.generated_token_ids])
        return prefix_hashes(
            tokens[: MAX_HASHED_BLOCKS * self._block_size], self._block_size, request.salt, model=self.model
        )

    def _hear(self, member: _Member, message: ReplicaStatus | CacheReport) -> None:
        """Keeps the router's picture of the replica's cache; a lone replica needs none."""
        replica_id = member.client.replica_id
        if isinstance(message, ReplicaStatus):
            member.sent_tokens = 0
            if len(self._members) > 1 and message.cache_version != member.cache_version:
                member.client.send(CacheQuery(member.cache_version))
            if message.draining:
                self.drain(replica_id)
        elif replica_id in self._members and message.since in (0, member.cache_version):
            member.cache_version = message.version
            self._router.update(replica_id, message)

    async def _keep_ready(self, member: _Member) -> None:
        """Ready from a canary token on, until the replica has a problem; then again."""
        client = member.client
        while True:
            await client.wait_until(well=True)
            try:
                await run_canary(client, CANARY_TIMEOUT_S)
            except QuireError as error:
                if member.is_draining:
                    return
                _log.warning("the canary request failed: %s", error)
                await asyncio.sleep(CANARY_RETRY_S)
                continue
            member.is_ready = True
            self._note_change()
            await client.wait_until(well=False)
            member.is_ready = False
            self._note_change()

    async def _tell_failures(self, client: ReplicaClient) -> None:
        """Whoever waits for a replica looks anew when one fails, were it ready or not."""
        while True:
            await client.wait_until_failed()
            self._note_change()
            await client.wait_until(well=True)

    def _note_change(self) -> None:
        self._changes.notify()
        self._on_change()

    async def _close(self, member: _Member, reason: str) -> None:
        for task in member.tasks:
            task.cancel()
        await asyncio.gather(*member.tasks, return_exceptions=True)
        self._note_change()
        await member.client.close(reason)
