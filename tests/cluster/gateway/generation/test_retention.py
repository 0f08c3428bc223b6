"""RetainedRequests: bounded in time, number and bytes, for each tenant and in all."""

from __future__ import annotations

import pytest

from quire.cluster.gateway.generation.retention import RetainedRequests, RetentionLimits


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def kept_of(store: RetainedRequests[int], tenant: str, count: int) -> list[int]:
    return [number for number in range(count) if store.get((tenant, str(number))) is not None]


def test_value_is_kept_until_it_expires() -> None:
    clock = Clock()
    store: RetainedRequests[int] = RetainedRequests(RetentionLimits(retention_s=60.0), clock)
    store.put(("a", "r"), 7, 10)
    clock.now = 59.9
    assert store.get(("a", "r")) == 7
    assert store.get(("b", "r")) is None
    clock.now = 60.0
    assert store.get(("a", "r")) is None
    assert (len(store), store.num_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (RetentionLimits(max_requests=3), [7, 8, 9]),
        (RetentionLimits(max_bytes=45), [6, 7, 8, 9]),
        (RetentionLimits(retention_s=0.0), []),
        (RetentionLimits(max_bytes=9), []),
    ],
)
def test_tenant_keeps_the_newest_within_its_bounds(limits: RetentionLimits, kept: list[int]) -> None:
    store: RetainedRequests[int] = RetainedRequests(limits, Clock())
    store.put(("other", "0"), 1, min(10, limits.max_bytes))
    for number in range(10):
        store.put(("a", str(number)), number + 1, 10)
    assert kept_of(store, "a", 10) == kept
    assert kept_of(store, "other", 1) == ([0] if limits.retention_s else [])


def test_all_tenants_together_stay_within_their_bound() -> None:
    store: RetainedRequests[int] = RetainedRequests(RetentionLimits(max_total_bytes=50), Clock())
    for number in range(10):
        store.put((str(number), "r"), 1, 10)
    assert store.num_bytes == 50
    assert [number for number in range(10) if store.get((str(number), "r"))] == [5, 6, 7, 8, 9]


def test_second_value_of_a_key_replaces_the_first() -> None:
    store: RetainedRequests[int] = RetainedRequests(RetentionLimits(), Clock())
    store.put(("a", "r"), 1, 10)
    store.put(("a", "r"), 2, 20)
    assert (store.get(("a", "r")), len(store), store.num_bytes) == (2, 1, 20)
    store.discard(("a", "r"))
    store.discard(("a", "r"))
    assert (store.get(("a", "r")), len(store), store.num_bytes) == (None, 0, 0)
