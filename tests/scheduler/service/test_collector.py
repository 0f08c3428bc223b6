"""Garbage collections of a scheduler's process: full ones only while it is idle, and none of retained outputs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from driver import Driver
from fakes import random_prompt, small_config

from quire.scheduler.core.replies.retained_outputs import KnownOutput
from quire.scheduler.service.collector import BUSY_INTERVAL_S, IDLE_INTERVAL_S, IdleCollector


class Cycle:
    """An object that only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collector() -> Iterator[IdleCollector]:
    thresholds = gc.get_threshold()
    collector = IdleCollector()
    collector.start()
    yield collector
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def old_cycle() -> weakref.ref[Cycle]:
    """Return a reference to a cycle that only a full collection frees."""
    cycle = Cycle()
    gc.collect(1)
    assert not any(cycle is each for each in gc.get_objects(1)), "it is in the oldest generation"
    return weakref.ref(cycle)


@pytest.mark.parametrize(("is_idle", "interval_s"), [(True, IDLE_INTERVAL_S), (False, BUSY_INTERVAL_S)])
def test_cycles_are_collected_after_an_interval(
    collector: IdleCollector, is_idle: bool, interval_s: float
) -> None:
    collector.turn(0.0, is_idle=is_idle)
    cycle = old_cycle()
    collector.turn(interval_s - 1, is_idle=is_idle)
    assert cycle() is not None
    collector.turn(interval_s, is_idle=is_idle)
    assert cycle() is None


def test_no_full_collection_begins_by_itself(collector: IdleCollector) -> None:
    cycle, generations = old_cycle(), list[int]()

    def on_collection(phase: str, info: dict[str, int]) -> None:
        generations.append(info["generation"])

    gc.callbacks.append(on_collection)
    try:
        kept = [list[object]() for _ in range(100_000)]  # many generations of lists that stay
    finally:
        gc.callbacks.remove(on_collection)
    assert kept
    assert 1 in generations
    assert 2 not in generations
    assert cycle() is not None


def test_retained_outputs_are_no_work_for_the_garbage_collector() -> None:
    driver = Driver(small_config())
    for handle in range(50):
        driver.add(handle, random_prompt(6), max_tokens=2)
        driver.run()
    gc.collect()
    retained = driver.scheduler._state.retained
    assert len(retained) == 50
    assert not [each for each in retained._kept if gc.is_tracked(each)]
    assert not gc.is_tracked(retained._of_request)
    assert not [each for each in gc.get_objects() if isinstance(each, KnownOutput)]
