"""RecentRefusals: what a replica has just refused, so that its gateway refuses the next such requests by itself.

A refusal by the scheduler costs the gateway the checks, the tokenizing and a message each way. Under overload that is
time of the processors that the replicas need.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....proto.errors import Overloaded
from ....proto.refusal import MAX_HOLD_S, RefusalScope
from ....proto.stream import Finish, Submit
from ...text.requests.request import Request

# Tenants of which a refusal is kept: bounds the memory for names, which callers without a token choose.
MAX_TENANTS = 1024


@dataclass(frozen=True, slots=True)
class Moment:
    """A time, in seconds of a monotonic clock, and `ReplicaClient.num_ended` at that time."""

    time_s: float
    num_ended: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that a replica refused when it came.

    Attributes:
        sent: when the request was sent: the scope holds from then on.
    """

    num_prompt_tokens: int
    priority: int
    error: str
    retry_after_s: float | None
    scope: RefusalScope
    sent: Moment

    def holds(self, now: Moment) -> bool:
        """Return whether the replica has no more room than when it refused the request."""
        return now.num_ended == self.sent.num_ended and now.time_s < self.sent.time_s + self.scope.hold_s

    def has(self, priority: int, timeout_s: float | None) -> bool:
        """Return whether another request of the tenant is in the scope."""
        return priority <= self.priority and self.scope.has(timeout_s)

    def repeat(self, replica_id: str, now_s: float) -> Overloaded:
        """Return the error of a request in the scope, with the rest of the delay."""
        age_s = now_s - self.sent.time_s
        delay_s = None if self.retry_after_s is None else max(MAX_HOLD_S, self.retry_after_s - age_s)
        return Overloaded(
            f"refused by the gateway, as replica {replica_id} refused another request of the tenant "
            f"{1e3 * age_s:.0f} ms ago: {self.error}",
            retry_after_s=delay_s,
        )


class RecentRefusals:
    """The latest refusal of each tenant by one replica. Pure: time is an argument."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, Refusal] = {}

    def add(self, request: Request | Submit, finish: Finish, sent: Moment) -> None:
        """Keep a refusal, if the scheduler says what else it would refuse.

        Args:
            sent: see `Refusal`.
        """
        if finish.scope is None:
            return
        if len(self._by_tenant) >= MAX_TENANTS:
            self._by_tenant.clear()  # they hold for MAX_HOLD_S at most
        num_prompt_tokens = len(request.prompt_token_ids)
        self._by_tenant[request.tenant] = Refusal(
            num_prompt_tokens, request.priority, finish.error, finish.retry_after_s, finish.scope, sent
        )

    def __contains__(self, tenant: str) -> bool:
        """Return whether a refusal of the tenant is kept; it may not hold any more."""
        return tenant in self._by_tenant

    def find(self, tenant: str, priority: int, timeout_s: float | None, now: Moment) -> Refusal | None:
        """Return the refusal that a request would repeat, or None if the scheduler may take it."""
        found = self._by_tenant.get(tenant)
        if found is None:
            return None
        if not found.holds(now):
            del self._by_tenant[tenant]
            return None
        return found if found.has(priority, timeout_s) else None
