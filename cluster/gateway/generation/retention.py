"""RetainedRequests: finished requests, kept for a while within bounds per tenant. Pure: the clock is an argument."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

RequestKey = tuple[str, str]  # (tenant, request_id): no tenant can reach another tenant's requests

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """Limits of what a gateway keeps for calls that are repeated or resumed.

    Attributes:
        resume_window_s: time that a resumable request runs on without a reader.
        retention_s: time that a finished request is kept; 0 keeps none.
        max_requests: finished requests per tenant.
        max_bytes: memory of finished requests per tenant.
        max_request_bytes: memory of the output of one request, running or finished.
        max_total_bytes: memory of finished requests of all tenants.
    """

    resume_window_s: float = 10.0
    retention_s: float = 60.0
    max_requests: int = 1024
    max_bytes: int = 32 << 20
    max_request_bytes: int = 8 << 20
    max_total_bytes: int = 128 << 20


@dataclass(slots=True)
class _Entry(Generic[T]):
    value: T
    num_bytes: int
    expires_at: float


@dataclass(slots=True)
class _Tenant(Generic[T]):
    """request_id |-> entry, oldest first, and the sum of their bytes."""

    entries: OrderedDict[str, _Entry[T]] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class RetainedRequests(Generic[T]):
    """(tenant, request_id) |-> value. Drops what is too old first, then the oldest of what is too much."""

    def __init__(self, limits: RetentionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._tenants: dict[str, _Tenant[T]] = {}
        self._order: OrderedDict[RequestKey, None] = OrderedDict()  # all keys, oldest first
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._order)

    def get(self, key: RequestKey) -> T | None:
        """Return the value that is kept for the key, or None."""
        self._drop_expired()
        tenant, request_id = key
        return self._tenants[tenant].entries[request_id].value if key in self._order else None

    def put(self, key: RequestKey, value: T, num_bytes: int) -> None:
        """Keep a value, in place of an earlier one."""
        self.discard(key)
        self._drop_expired()
        limits, (name, request_id) = self._limits, key
        if not limits.retention_s or not limits.max_requests or num_bytes > limits.max_bytes:
            return
        tenant = self._tenants.get(name)
        while tenant and (
            len(tenant.entries) >= limits.max_requests or tenant.num_bytes + num_bytes > limits.max_bytes
        ):
            self.discard((name, next(iter(tenant.entries))))
            tenant = self._tenants.get(name)
        while self._order and self.num_bytes + num_bytes > limits.max_total_bytes:
            self.discard(next(iter(self._order)))
        tenant = self._tenants.setdefault(name, _Tenant())
        tenant.entries[request_id] = _Entry(value, num_bytes, self._clock() + limits.retention_s)
        tenant.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self._order[key] = None

    def discard(self, key: RequestKey) -> None:
        """Drop what is kept for the key, if anything is."""
        if key not in self._order:
            return
        name, request_id = key
        tenant = self._tenants[name]
        entry = tenant.entries.pop(request_id)
        tenant.num_bytes -= entry.num_bytes
        self.num_bytes -= entry.num_bytes
        del self._order[key]
        if not tenant.entries:
            del self._tenants[name]

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._order:
            oldest = next(iter(self._order))
            if self._tenants[oldest[0]].entries[oldest[1]].expires_at > now:
                return
            self.discard(oldest)
