"""Growth of resources during a soak."""

from __future__ import annotations

from dataclasses import replace

from tests.chaos.site import DESCRIPTOR_SLACK, Resources
from tests.chaos.soak import BYTES_SLACK, growth_of

FLAT = Resources(num_processes=4, num_threads=20, num_descriptors=100, num_shared_memories=3, num_bytes=10**9)


def test_flat_resources_have_not_grown() -> None:
    assert growth_of([FLAT] * 12) == []


def test_growth_of_memory_threads_and_descriptors_is_found() -> None:
    for field, step, word in (
        ("num_bytes", BYTES_SLACK, "num_bytes grew"),
        ("num_threads", 2, "num_threads grew"),
        ("num_descriptors", DESCRIPTOR_SLACK, "descriptors more"),
        ("num_processes", 1, "processes more"),
    ):
        samples = [replace(FLAT, **{field: getattr(FLAT, field) + number * step}) for number in range(12)]
        (problem,) = growth_of(samples)
        assert word in problem
