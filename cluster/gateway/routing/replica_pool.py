"""ReplicaPool: one gateway's view of one model's replicas. Chooses replicas and holds requests that wait for one."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from ....proto.digests import make_root, prefix_hashes, whole_prompt_salt
from ....proto.errors import Overloaded, QuireError, ReplicaUnavailable
from ....proto.kv_transfer import PULL_OVERHEAD_S
from ....proto.replica_status import Activity, ReplicaRole, ReplicaStatus
from ....proto.stream import CacheQuery, CacheReport, RecalledOutput, best_outputs
from ...fleet.controller.fleet_state import Demand
from ...fleet.replica.canary import run_canary
from ...fleet.replica.client import ReplicaClient
from ...fleet.routing.hot_prefixes import HotPrefix, HotPrefixes
from ...fleet.routing.prefill_split import PromptAt, PullRate, SplitEstimate, estimate_split
from ...fleet.routing.router import ReplicaLoad, Router
from ...os_utils.event_loop import ChangeNotifier, run_in_background
from ...text.requests.request import Request
from .registries import LoraRegistry, WeightsRegistry
from .request_migration import MigratingRequest, MoveListener, Placement, Stage, ignore_move
from .warming import warm

CANARY_TIMEOUT_S = 60.0
CANARY_RETRY_S = 1.0
# An idle replica that is ready has generated a token within this time, of any gateway's canary.
IDLE_CANARY_S = 10.0
# Of this time, the share after which a gateway begins to think of a canary: at a moment of its own.
EARLIEST_CANARY = 0.7
# A replica that does not answer in this time may hang: the request is computed again, which takes as long at most.
RECALL_TIMEOUT_S = 1.0
# For orders without an answer to arrive at replicas that the gateway does not use.
ORDER_LINGER_MS = 1000
# Blocks of a prompt that are hashed for routing, at most.
MAX_HASHED_BLOCKS = 4096

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Member:
    """A replica of the pool.

    Attributes:
        is_ready: a canary token has come through all ranks to this gateway since the replica's last problem.
        is_draining: the replica must get no more requests.
        is_leaving: the gateway uses other replicas from now on, and parts from this one once nothing runs there.
        cache_version: version of the replica's prefix cache that the router has.
        num_sent_tokens: prompt tokens to compute that were sent to the replica since its last status.
        was_held_by: `held_by` at the last status.
        warming: reads what the other replicas' prompts share; None before it was first ready.
    """

    client: ReplicaClient
    weights: WeightsRegistry
    is_ready: bool = False
    is_draining: bool = False
    is_leaving: bool = False
    cache_version: int = 0
    num_sent_tokens: int = 0
    was_held_by: str = ""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    warming: asyncio.Task[None] | None = None

    @property
    def takes_requests(self) -> bool:
        status = self.client.latest_status
        drains = self.is_draining or self.is_leaving or (status is not None and status.draining)
        return self.is_ready and not drains and not self.client.problem and not self.held_by

    @property
    def held_by(self) -> str:
        """Return the command of an operator that keeps requests away; empty if none does."""
        status = self.client.latest_status
        if status is None:
            return ""
        if status.sleep_level:
            return "the engine sleeps; wake it up first"
        return "" if self.weights.is_current(status) else "it has not loaded the latest weights yet"

    @property
    def proves_itself(self) -> bool:
        """Return whether a canary may run: no operator holds the steps."""
        status = self.client.latest_status
        return not self.held_by and (status is None or not status.is_paused)

    @property
    def is_for_prefill(self) -> bool:
        """Return whether it computes prompts for other replicas."""
        status = self.client.latest_status
        return status is not None and status.role is ReplicaRole.PREFILL

    def needs_proof(self, patience_s: float) -> bool:
        """Return whether the replica is idle, and no step of it is known for `patience_s`."""
        status = self.client.latest_status
        is_idle = status is not None and not status.num_running + status.num_waiting
        return is_idle and self.proves_itself and time.monotonic() - self.client.proved_at >= patience_s

    @property
    def may_become_ready(self) -> bool:
        return not self.client.has_failed and not self.is_draining and not self.is_leaving

    @property
    def load(self) -> ReplicaLoad:
        status = self.client.latest_status
        assert status is not None, "a ready replica has sent a status"
        return ReplicaLoad(queued_tokens=status.queued_tokens + self.num_sent_tokens, kv_use=status.kv_use)


class ReplicaPool:
    """Runs requests on the replicas that are added to it. For one event loop.

    Requests wait for replicas, and resume at other replicas when theirs fails or drains.

    Args:
        model: name of the model that the replicas serve.
        block_size: tokens per KV block.
        sees_whole_prompt: as in ModelConfig.
        max_waiting: requests that may wait for a replica.
        max_wait_s: time that each request may wait for a replica.
        on_demand: called when a request begins to wait.
        on_change: called when the readiness of the pool may have changed.
        explain_unavailable: returns why there is no replica, for the error of requests that waited in vain.

    Attributes:
        adapters: the LoRA adapters that its replicas serve.
        weights: the weights that its replicas must have.
        num_warmed_tokens: of prefixes that replicas were told to read when they became ready.
    """

    def __init__(
        self,
        model: str,
        block_size: int,
        *,
        sees_whole_prompt: bool = False,
        max_waiting: int = 4096,
        max_wait_s: float = 600.0,
        on_demand: Callable[[], None] = lambda: None,
        on_change: Callable[[], None] = lambda: None,
        explain_unavailable: Callable[[], str] = lambda: "",
    ) -> None:
        self.model = model
        self.max_waiting = max_waiting
        self.max_wait_s = max_wait_s
        self._block_size, self._sees_whole_prompt = block_size, sees_whole_prompt
        self._on_demand = on_demand
        self._on_change = on_change
        self._explain_unavailable = explain_unavailable
        self._members: dict[str, _Member] = {}
        self._clients: dict[str, ReplicaClient] = {}  # replaced, not changed: it is read across awaits
        self._router = Router(block_size)  # of whole requests
        self._prefill_router = Router(block_size)  # of prompts, among the replicas with that role
        self.adapters = LoraRegistry(model)
        self.weights = WeightsRegistry()
        self._num_arrived_requests = self._num_arrived_tokens = self._num_prefill_tokens = 0
        self._num_waiting = self._num_waiting_tokens = 0
        self._hot = HotPrefixes(block_size)
        self.num_warmed_tokens = 0
        self._changes = ChangeNotifier()
        self._unused: Mapping[str, Callable[[], ReplicaClient]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._is_retired = False

    @property
    def is_ready(self) -> bool:
        """A request would be sent to a replica at once."""
        return any(member.takes_requests for member in self._members.values())

    @property
    def queue_delay_s(self) -> float | None:
        """Estimated time for the shortest queue to be computed at its replica's present speed; None if unknown."""
        statuses = [m.client.latest_status for m in self._members.values() if m.takes_requests]
        delays = [
            each.queued_tokens / each.tokens_per_s for each in statuses if each and each.tokens_per_s > 0
        ]
        return min(delays, default=None)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a replica."""
        return self._num_waiting

    @property
    def clients(self) -> Mapping[str, ReplicaClient]:
        """replica_id |-> its client."""
        return self._clients

    @property
    def statuses(self) -> list[ReplicaStatus]:
        """Latest status of each replica that has sent one."""
        found = (member.client.latest_status for member in self._members.values())
        return [status for status in found if status is not None]

    def why_unavailable(self, replica_id: str) -> str:
        """Return why the replica gets no requests; empty if it gets requests."""
        member = self._members.get(replica_id)
        if member is None:
            return "removed from the pool"
        if member.takes_requests:
            return ""
        if member.is_draining:
            return "draining"
        if member.is_leaving:
            return "other gateways use it"
        return member.held_by or "no canary token has come through all ranks yet"

    def add(self, client: ReplicaClient) -> None:
        """Add a replica whose client has been started. It gets requests after its first canary token."""
        member = _Member(client, self.weights)
        self._members[client.replica_id] = member
        self._clients = {**self._clients, client.replica_id: client}
        client.add_listener(lambda message: self._on_message(member, message))
        member.tasks = [
            run_in_background(self._maintain_readiness(member), f"checking {client.replica_id}"),
            run_in_background(self._notify_on_failures(client), f"watching {client.replica_id}"),
        ]

    def drain(self, replica_id: str) -> None:
        """Send the replica no more requests. Its running requests continue until it hands them off."""
        member = self._members.get(replica_id)
        if member is not None and not member.is_draining:
            member.is_draining = True
            self._update_load(member)
            self._notify_change()

    def leave(self, replica_id: str) -> None:
        """Send the replica no more requests, and remove it once nothing runs there: other gateways use it."""
        member = self._members[replica_id]
        if not member.is_leaving:
            member.is_leaving = True
            self._update_load(member)
            self._notify_change()
        self._part_from_idle(member)

    def stay(self, replica_id: str) -> None:
        """Take back `leave`."""
        member = self._members[replica_id]
        if member.is_leaving:
            member.is_leaving = False
            self._update_load(member)
            self._notify_change()

    def _part_from_idle(self, member: _Member) -> None:
        replica_id = member.client.replica_id
        is_idle = not member.client.num_running
        if member.is_leaving and is_idle and self._members.get(replica_id) is member:
            self.remove(replica_id, "other gateways use it")

    def set_unused(self, connect: Mapping[str, Callable[[], ReplicaClient]]) -> None:
        """Set the ready replicas that only other gateways use, each with a function that makes a started client."""
        self._unused = connect

    @property
    def unused_ids(self) -> list[str]:
        """Ids of the ready replicas that only other gateways use."""
        return [name for name in self._unused if name not in self._clients]

    @asynccontextmanager
    async def reach(
        self, replica_ids: Collection[str] | None = None
    ) -> AsyncIterator[dict[str, ReplicaClient]]:
        """Yield replica_id |-> client, for an operator's orders; None for all replicas.

        Those that this gateway does not use get connections for the time of the block.
        """
        used = {
            name: each for name, each in self._clients.items() if replica_ids is None or name in replica_ids
        }
        unused = [name for name in self.unused_ids if replica_ids is None or name in replica_ids]
        opened = {name: self._unused[name]() for name in unused}
        try:
            yield used | opened
        finally:
            closing = (client.close(linger_ms=ORDER_LINGER_MS) for client in opened.values())
            await asyncio.gather(*closing)

    def retire(self) -> None:
        """No replica will be added any more: requests fail once none of the present ones can become ready."""
        self._is_retired = True
        self._notify_change()

    def remove(self, replica_id: str, reason: str) -> None:
        """Close the client of a replica that has ended or will end; its running requests move to other replicas."""
        member = self._members.pop(replica_id)
        self._clients = {name: client for name, client in self._clients.items() if name != replica_id}
        for router in (self._router, self._prefill_router):
            router.remove_replica(replica_id)
        self.weights.forget(member.client)
        closing = run_in_background(self._close_member(member, reason), f"closing the client of {replica_id}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Remove every replica, and end what runs there."""
        for replica_id in list(self._members):
            self.remove(replica_id, "its gateway was closed")
        if self._closing:
            # Unlike gather, a canceled wait leaves its tasks alone: a client that is not closed blocks the collector.
            await asyncio.wait(self._closing)

    async def recall(self, request: Request) -> dict[int, RecalledOutput]:
        """Return index |-> what the replicas know of the request's outputs from another gateway's run of it."""
        if not request.may_be_recalled:
            return {}
        clients = [client for client in self.clients.values() if not client.has_failed]
        queries = (client.recall(request, RECALL_TIMEOUT_S) for client in clients)
        answers = await asyncio.gather(*queries, return_exceptions=True)
        return best_outputs(each for answer in answers if isinstance(answer, tuple) for each in answer)

    def submit(
        self,
        request: Request,
        on_move: MoveListener = ignore_move,
        recalled: Mapping[int, RecalledOutput] | None = None,
    ) -> MigratingRequest:
        """Run the request.

        Args:
            on_move, recalled: see MigratingRequest.

        Raises:
            Overloaded: too many requests wait for a replica already.
            ReplicaUnavailable: there is no replica, and none will be added.
        """
        self._num_arrived_requests += 1
        self._num_arrived_tokens += len(request.prompt_token_ids)
        if not self.is_ready:
            self._check_may_wait()
        running = MigratingRequest(request, self, on_move=on_move, recalled=recalled)
        running.start()
        return running

    def collect_demand(self) -> Demand:
        """Return the requests that arrived since the last call, and those that wait now."""
        demand = Demand(
            self._num_arrived_requests,
            self._num_arrived_tokens,
            self._num_waiting,
            self._num_waiting_tokens,
            self._num_prefill_tokens,
        )
        self._num_arrived_requests = self._num_arrived_tokens = self._num_prefill_tokens = 0
        return demand

    def choose(self, request: Request, stage: Stage = Stage.RESUMES) -> Placement | None:
        if not self.is_ready:
            return None
        # No hashing for a choice of one, unless a second replica could read what prompts share.
        is_hashed = len(self._members) > 1 or any(status.kv_layout for status in self.statuses)
        hashes = self._hashes(request) if is_hashed else []
        member = self._choose_whole(hashes, request.salt)
        if member is None:  # some take requests again since their last status
            for each in self._members.values():
                self._update_load(each)
            member = self._choose_whole(hashes, request.salt)
        assert member is not None, "the pool is ready, and no replica takes requests"
        split = self._split(request, hashes, member) if stage is Stage.BEGINS else None
        if split is not None:
            helper, estimate = split
            self._num_prefill_tokens += len(request.prompt_token_ids)
            self._record(helper, hashes, self._num_uncached(helper, request, hashes))
            return Placement(helper.client, estimate.patience_s)
        num_tokens = self._num_uncached(member, request, hashes)
        if stage is Stage.BEGINS:
            num_cached = len(request.prompt_token_ids) - num_tokens
            self._hot.note(request, hashes, num_cached // self._block_size, time.monotonic())
        found = self._find_lender(member, request, hashes, num_tokens) if stage is Stage.BEGINS else None
        # Of a sequence that brings its KV, the last block is computed.
        num_computed = (
            self._block_size if stage is Stage.BRINGS_KV else num_tokens - (found[1] if found else 0)
        )
        self._record(member, hashes, num_computed)
        return Placement(member.client, lender=found[0] if found else None)

    def _choose_whole(self, hashes: Sequence[bytes], salt: bytes) -> _Member | None:
        """Return the replica to run a whole request; one for prompts only if no other takes requests."""
        member = self._choose_member(self._router, hashes, salt)
        return self._choose_member(self._prefill_router, hashes, salt) if member is None else member

    def _split(
        self, request: Request, hashes: Sequence[bytes], member: _Member
    ) -> tuple[_Member, SplitEstimate] | None:
        """Return the replica that should compute the prompt for `member`; None if `member` should itself."""
        if member.is_for_prefill or not _may_be_split(request):
            return None
        helper = self._choose_member(self._prefill_router, hashes, request.salt)
        if helper is None:
            return None
        own, other = member.client.latest_status, helper.client.latest_status
        if own is None or other is None or not own.kv_layout or own.kv_layout != other.kv_layout:
            return None
        if own.num_waiting >= self.max_waiting:
            return None  # its queue is full, for sequences that come with a token as well: let it refuse the request
        estimate = estimate_split(
            PromptAt.of(own, member.num_sent_tokens, self._num_uncached(member, request, hashes)),
            PromptAt.of(other, helper.num_sent_tokens, self._num_uncached(helper, request, hashes)),
            PullRate.of(own),
        )
        return (helper, estimate) if estimate is not None and estimate.pays else None

    def _num_uncached(self, member: _Member, request: Request, hashes: Sequence[bytes]) -> int:
        """Return the prompt tokens that the replica would compute."""
        num_blocks = self._router_of(member).num_cached_blocks(member.client.replica_id, hashes)
        return len(request.prompt_token_ids) - self._block_size * num_blocks

    def _find_lender(
        self, member: _Member, request: Request, hashes: Sequence[bytes], num_uncached: int
    ) -> tuple[ReplicaClient, int] | None:
        """Return a replica that has more of a prompt cached than `member`, and how many tokens.

        Returns None if there is none, or `member` computes these tokens sooner than it can read them.
        """
        own = member.client.latest_status
        if own is None or not own.kv_layout or not _may_be_split(request):
            return None
        num_blocks, names = self._router_of(member).longest_prefix(hashes)
        num_more = self._block_size * num_blocks - (len(request.prompt_token_ids) - num_uncached)
        if num_more <= 0 or not own.prefill_tokens_per_s:
            return None
        # The loan costs messages as the read does.
        if PULL_OVERHEAD_S + PullRate.of(own).seconds(num_more) >= num_more / own.prefill_tokens_per_s:
            return None
        lender = self._least_loaded(names, member)
        return None if lender is None else (lender, num_more)

    def _least_loaded(self, names: Iterable[str], other: _Member) -> ReplicaClient | None:
        """Return the client of a replica whose blocks another one can read."""
        status = other.client.latest_status
        ready = [
            each
            for each in (self._members[name] for name in names)
            if each is not other
            and each.takes_requests
            and status is not None
            and each.client.latest_status is not None
            and each.client.latest_status.kv_layout == status.kv_layout
        ]
        return min(ready, key=lambda each: each.load.queued_tokens).client if ready else None

    def _record(self, member: _Member, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Count a request that is sent to a replica, which computes so many tokens of the prompt."""
        self._router_of(member).record_submit(member.client.replica_id, hashes)
        member.num_sent_tokens += num_tokens
        self._update_load(member)

    def _router_of(self, member: _Member) -> Router:
        return self._prefill_router if member.is_for_prefill else self._router

    def _choose_member(self, router: Router, hashes: Sequence[bytes], salt: bytes) -> _Member | None:
        """Return the router's choice; None if it knows of no replica that takes requests."""
        while (replica_id := router.choose(hashes, salt)) is not None:
            member = self._members[replica_id]
            if member.takes_requests:
                return member
            self._update_load(member)  # it has failed since its last status
        return None

    def _update_load(self, member: _Member) -> None:
        """Tell the router a replica's load, or that it takes no requests.

        Not called at each event after which a replica takes requests or does not: `choose` looks at its choice.
        """
        replica_id = member.client.replica_id
        if self._members.get(replica_id) is member:  # not one that was removed
            self._router_of(member).set_load(replica_id, member.load if member.takes_requests else None)

    async def wait_for_replica(
        self, request: Request, timeout_s: float | None, stage: Stage = Stage.RESUMES
    ) -> Placement:
        """See `ReplicaPicker`. Requests that have begun wait even if `max_waiting` requests wait already."""
        wait_s = self.max_wait_s if timeout_s is None else min(timeout_s, self.max_wait_s)
        self._num_waiting += 1
        self._num_waiting_tokens += len(request.prompt_token_ids)
        self._on_demand()
        try:
            async with asyncio.timeout(wait_s):
                while (placement := self.choose(request, stage)) is None:
                    self._check_may_become_ready()
                    await self._changes.wait()
                return placement
        except TimeoutError:
            why = self._explain_unavailable()
            reason = f"no replica of {self.model} was ready in {wait_s:.0f} s" + (f": {why}" if why else "")
            raise ReplicaUnavailable(reason) from None
        finally:
            self._num_waiting -= 1
            self._num_waiting_tokens -= len(request.prompt_token_ids)

    def _check_may_wait(self) -> None:
        self._check_may_become_ready()
        if self._num_waiting >= self.max_waiting:
            raise Overloaded(
                f"no replica of {self.model} is ready, and {self._num_waiting} requests wait for one already"
            )

    def _check_may_become_ready(self) -> None:
        """Raise ReplicaUnavailable if no replica can become ready, or an operator has put all of them to sleep."""
        statuses = self.statuses
        if statuses and all(status.sleep_level for status in statuses):
            raise ReplicaUnavailable(f"all replicas of {self.model} sleep; wake them up first")
        if not self._is_retired or any(member.may_become_ready for member in self._members.values()):
            return
        problems = [member.client.problem for member in self._members.values()]
        raise ReplicaUnavailable(
            "; ".join(filter(None, problems)) or f"no replica of {self.model} takes requests"
        )

    def _hashes(self, request: Request) -> list[bytes]:
        tokens = request.prompt_token_ids
        if len(request.generated_token_ids):
            tokens = np.concatenate([tokens, request.generated_token_ids])
        adapter, salt = "" if request.lora is None else request.lora.cache_key, request.salt
        if self._sees_whole_prompt:
            salt = whole_prompt_salt(salt, request.prompt_token_ids, request.media)
        root = make_root(self.model, salt, adapter, tenant=request.tenant, pool=request.prefix_pool)
        return prefix_hashes(
            tokens[: MAX_HASHED_BLOCKS * self._block_size], self._block_size, root, request.media
        )

    def _on_message(self, member: _Member, message: ReplicaStatus | CacheReport) -> None:
        if isinstance(message, ReplicaStatus):
            self._on_status(member, message)
        elif member.client.replica_id in self._members and message.since in (0, member.cache_version):
            member.cache_version = message.version
            self._router_of(member).apply_report(member.client.replica_id, message)

    def _on_status(self, member: _Member, status: ReplicaStatus) -> None:
        """Reset the load estimate, and query the replica's cache unless it is the only replica."""
        member.num_sent_tokens = 0
        self.weights.on_status(member.client, status)
        self._update_load(member)
        if member.held_by != member.was_held_by:
            member.was_held_by = member.held_by
            self._notify_change()
        if self.adapters.on_status(member.client, status):
            self._on_change()
        if len(self._members) > 1 and status.cache_version != member.cache_version:
            member.client.send(CacheQuery(member.cache_version))
        if status.draining:
            self.drain(member.client.replica_id)
        self._part_from_idle(member)
        if status.activity is Activity.RECOVERING and self.is_ready:
            # Another replica continues sooner: at two busy cores after 0.75 s, a rebuilt rank after 2 to 3 s.
            member.client.release(status.problem)

    async def _maintain_readiness(self, member: _Member) -> None:
        """Mark the replica ready after a canary token, and not ready while it has a problem."""
        client = member.client
        while True:
            await client.wait_until_healthy()
            try:
                while not member.proves_itself:
                    await client.next_status(CANARY_TIMEOUT_S)
                await run_canary(client, CANARY_TIMEOUT_S)
            except QuireError as error:
                if member.is_draining:
                    return
                _log.warning("the canary request failed: %s", error)
                await asyncio.sleep(CANARY_RETRY_S)
                continue
            member.is_ready = True
            self._update_load(member)
            self._notify_change()
            self._begin_warming(member)
            try:
                await self._until_unhealthy(member)
            except QuireError as error:
                _log.warning("the canary request of an idle replica failed: %s", error)
            member.is_ready = False
            self._update_load(member)
            self._notify_change()

    def _begin_warming(self, member: _Member) -> None:
        """Have a replica that is ready read what prompts share from the others, beside its requests."""
        if member.warming is not None:
            member.warming.cancel()
        prefixes = self._hot.hottest(time.monotonic())
        if prefixes and len(self._members) > 1:
            name = f"warming {member.client.replica_id}"
            member.warming = run_in_background(self._warm(member, prefixes), name)

    async def _warm(self, member: _Member, prefixes: Sequence[HotPrefix]) -> None:
        def find_lender(hashes: Sequence[bytes]) -> ReplicaClient | None:
            for router in (self._router, self._prefill_router):
                num_blocks, names = router.longest_prefix(hashes)
                lender = self._least_loaded(names, member) if num_blocks == len(hashes) else None
                if lender is not None:
                    return lender
            return None

        def num_cached_blocks(hashes: Sequence[bytes]) -> int:
            return self._router_of(member).num_cached_blocks(member.client.replica_id, hashes)

        clock = asyncio.get_running_loop().time
        with suppress(ReplicaUnavailable):
            await member.client.status(CANARY_TIMEOUT_S)  # with its layout, which its first step has told
            async for num_tokens in warm(
                member.client, prefixes, self._block_size, num_cached_blocks, find_lender, clock
            ):
                self.num_warmed_tokens += num_tokens

    async def _until_unhealthy(self, member: _Member) -> None:
        """Return once the replica has a problem. While it is idle, run canaries: a hung rank shows only in a step.

        Each gateway waits for a random time, and then asks whether another one's canary has come through.

        Raises:
            QuireError: a canary failed.
        """
        client = member.client
        while True:
            patience_s = IDLE_CANARY_S * client.crowding * random.uniform(EARLIEST_CANARY, 1.0)
            left_s = client.proved_at + patience_s - time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s if left_s > 0 else patience_s):
                    await client.wait_until_unhealthy()
                    return
            if not member.needs_proof(patience_s):
                continue
            await client.next_status(CANARY_TIMEOUT_S)
            if member.needs_proof(patience_s):
                await run_canary(client, CANARY_TIMEOUT_S)

    async def _notify_on_failures(self, client: ReplicaClient) -> None:
        """Wake waiting requests when the replica fails, even if it was not ready before."""
        while True:
            await client.wait_until_failed()
            self._notify_change()
            await client.wait_until_healthy()

    def _notify_change(self) -> None:
        self._changes.notify()
        self._on_change()

    async def _close_member(self, member: _Member, reason: str) -> None:
        tasks = member.tasks if member.warming is None else [*member.tasks, member.warming]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._notify_change()
        await member.client.close(reason)


def _may_be_split(request: Request) -> bool:
    """Return whether another replica may continue a request after its first token, with its KV.

    Outputs that are ranked start anew when they move. Images are encoded again where a prompt is continued.
    """
    sampling = request.sampling
    is_ranked = sampling.is_ranked or sampling.beam_width is not None
    return sampling.max_tokens != 1 and not is_ranked and request.pooling is None and not request.media
