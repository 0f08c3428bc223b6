"""The limits of tenants: TenantLimiter refuses requests, TenantConcurrency lets long work wait for its turn."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from ....proto.errors import Overloaded, QuotaExceeded
from ...config.tenants import TenantOptions, Tenants
from ...os_utils.watched_file import Source, constant
from ...text.requests.outputs import CompletionDelta, StreamEvent
from ...text.requests.request import Request

# Idle tenants whose use is remembered: bounds the memory for names, which callers without a token choose.
MAX_IDLE_TENANTS = 4096
# Weight of the latest request in the mean duration of a tenant's requests.
_LATEST_SHARE = 0.2
# A share of a limit that is rounding: a caller that waits for the stated time must not be refused again.
_ROUNDING = 1e-9

NO_TENANTS: Source[Tenants] = constant(Tenants())


# Calls of one tenant. Fewer than there are worker processes of each kind, so that another tenant finds one free.
MAX_CONCURRENT = 2
# Until fewer calls of the tenant run.
QUEUE_TIMEOUT_S = 30.0
_MAX_THREADS = 64
T = TypeVar("T")


@dataclass(slots=True)
class _Bucket:
    """Token bucket that holds one minute's amount.

    More may be taken than it holds: the debt has to refill first.

    Attributes:
        used: amount taken that has not been refilled yet; above the limit it is a debt.
    """

    used: float = 0.0
    updated_at: float = 0.0

    def missing_s(self, per_minute: float, needed: float, now: float) -> float:
        """Return the seconds until the bucket has `needed`; 0 if it has."""
        self.used = max(0.0, self.used - (now - self.updated_at) * per_minute / 60)
        self.updated_at = now
        missing = self.used + needed - per_minute
        return 0.0 if missing <= _ROUNDING * per_minute else missing * 60 / per_minute

    def reset(self, now: float) -> None:
        self.used, self.updated_at = 0.0, now


@dataclass(slots=True)
class _Use:
    """Recent use of a tenant.

    Attributes:
        mean_duration_s: mean time of its requests; None before the first has ended.
    """

    num_running: int = 0
    requests: _Bucket = field(default_factory=_Bucket)
    tokens: _Bucket = field(default_factory=_Bucket)
    mean_duration_s: float | None = None


class Admission:
    """An admitted request, whose tokens are charged to its tenant as they are known."""

    def __init__(self, use: _Use) -> None:
        self._use = use
        self._num_computed = 1.0  # tokens that were computed per token that is returned

    def accept(self, request: Request) -> None:
        """Charge the prompt."""
        sampling = request.sampling
        self._use.tokens.used += len(request.prompt_token_ids)
        self._num_computed = (sampling.beam_width or sampling.num_sequences) / sampling.n

    def charge(self, event: StreamEvent) -> None:
        """Charge the tokens of a delta, and as many per output that best_of or a beam search drops."""
        if isinstance(event, CompletionDelta):
            self._use.tokens.used += len(event.token_ids) * self._num_computed


class TenantLimiter:
    """Admits requests as far as their tenants' limits allow. For one event loop.

    The rates are token buckets that hold one minute's amount. A request needs one of the requests per minute, and is
    admitted if a token is left, because how many it takes is known only later. So a tenant may exceed its tokens per
    minute by the requests that it runs at once, and then waits until the excess is refilled.

    Args:
        tenants: the tenants' current limits.
        clock: seconds; monotonic.
    """

    def __init__(
        self, tenants: Source[Tenants] = NO_TENANTS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tenants = tenants
        self._clock = clock
        self._uses: OrderedDict[str, _Use] = OrderedDict()  # tenant |-> its use; the latest last

    @contextmanager
    def admit(self, tenant: str) -> Iterator[Admission]:
        """Count a request as running while the block runs.

        Raises:
            QuotaExceeded: the tenant has reached a limit; the error has the time until it has not.
        """
        use, limits, started_at = self._use_of(tenant), self._tenants().of(tenant), self._clock()
        _check(tenant, use, limits, started_at)
        use.num_running += 1
        use.requests.used += 1
        try:
            yield Admission(use)
        finally:
            use.num_running -= 1
            self._record_duration(use, self._clock() - started_at)

    def _use_of(self, tenant: str) -> _Use:
        use = self._uses.setdefault(tenant, _Use())
        self._uses.move_to_end(tenant)
        if len(self._uses) > 2 * MAX_IDLE_TENANTS:
            self._forget_idle()
        return use

    def _forget_idle(self) -> None:
        """Drop all but the MAX_IDLE_TENANTS tenants that were idle last."""
        idle = [tenant for tenant, use in self._uses.items() if not use.num_running]
        for tenant in idle[:-MAX_IDLE_TENANTS]:
            del self._uses[tenant]

    def _record_duration(self, use: _Use, duration_s: float) -> None:
        mean_s = duration_s if use.mean_duration_s is None else use.mean_duration_s
        use.mean_duration_s = mean_s + _LATEST_SHARE * (duration_s - mean_s)


def _check(tenant: str, use: _Use, limits: TenantOptions, now: float) -> None:
    at_once = limits.max_concurrent_requests
    if at_once is not None and use.num_running >= at_once:
        # Of `at_once` requests one ends in this time, on average.
        retry_after_s = None if use.mean_duration_s is None else use.mean_duration_s / at_once
        raise QuotaExceeded(tenant, "concurrent_requests", at_once, retry_after_s=retry_after_s)
    for quota, limit, bucket in (
        ("requests_per_minute", limits.requests_per_minute, use.requests),
        ("tokens_per_minute", limits.tokens_per_minute, use.tokens),
    ):
        if limit is None:
            bucket.reset(now)  # a limit that is set later begins with a full bucket
        # Below one per minute, one is admitted from a full bucket, and leaves a debt of more than a minute.
        elif missing_s := bucket.missing_s(limit, min(1.0, limit), now):
            raise QuotaExceeded(tenant, quota, limit, retry_after_s=missing_s)


@dataclass(slots=True)
class _Tenant:
    """A tenant with calls.

    Attributes:
        num_calls: number of calls that run or wait.
    """

    limit: asyncio.Semaphore
    num_calls: int = 0


class TenantConcurrency:
    """Runs functions in threads, as many at once as the limit allows each tenant. For one event loop.

    Rendering and tokenizing 3 MB takes seconds, and compiling a grammar up to 10 s. Without the limit, a few such
    calls of one tenant held every thread of the gateway and every worker process, and the conversations of all others
    waited.
    """

    def __init__(self, max_concurrent: int = MAX_CONCURRENT) -> None:
        self._max_concurrent = max_concurrent
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="tenant")
        self._tenants: dict[str, _Tenant] = {}  # those with calls

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Return what `work` returns. It counts until it has ended, also if the caller is canceled.

        Raises:
            Overloaded: the tenant's earlier calls have not ended in time.
        """
        entry = self._tenants.setdefault(tenant, _Tenant(asyncio.Semaphore(self._max_concurrent)))
        entry.num_calls += 1
        try:
            async with asyncio.timeout(QUEUE_TIMEOUT_S):
                await entry.limit.acquire()
        except BaseException as error:
            self._leave(tenant, entry)
            if isinstance(error, TimeoutError):
                problem = (
                    f"earlier requests of the tenant were not checked in {QUEUE_TIMEOUT_S:g} s; retry later"
                )
                raise Overloaded(problem) from None
            raise
        loop = asyncio.get_running_loop()

        def on_end(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end, tenant, entry)

        future = self._threads.submit(work)
        future.add_done_callback(on_end)
        return await asyncio.wrap_future(future)

    def _end(self, tenant: str, entry: _Tenant) -> None:
        entry.limit.release()
        self._leave(tenant, entry)

    def _leave(self, tenant: str, entry: _Tenant) -> None:
        entry.num_calls -= 1
        if not entry.num_calls:
            del self._tenants[tenant]
