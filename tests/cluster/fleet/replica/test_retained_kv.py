"""RetainedKv: the scheduler keeps the segment that each rank uses, and knows whether a new rank uses it too."""

from __future__ import annotations

from contextlib import closing

from quire.cluster.fleet.replica.retained_memory import RetainedKv
from quire.worker.memory.kv_segment import KvSegment
from quire.worker.memory.shared_segment import SharedSegment


def test_segment_of_an_ended_rank_is_kept_for_the_next_one() -> None:
    with closing(RetainedKv()) as kept:
        with closing(KvSegment.create(4096)) as first:
            assert not kept.keep(0, first.address)
        address = kept.of_rank(0)
        assert address is not None
        with closing(KvSegment.open(address)) as second:
            assert second.is_inherited
            assert kept.keep(0, second.address)
        assert kept.of_rank(0) is not None
        assert kept.of_rank(1) is None


def test_other_memory_takes_the_place_of_the_kept_one() -> None:
    with (
        closing(RetainedKv()) as kept,
        closing(KvSegment.create(4096)) as old,
        closing(KvSegment.create(1)) as new,
    ):
        kept.keep(0, old.address)
        assert not kept.keep(0, new.address)
        address = kept.of_rank(0)
        assert address is not None
        assert address.name == new.address.name
        assert not kept.keep(0, None)
        assert kept.of_rank(0) is None


def test_memory_that_cannot_be_opened_is_not_kept() -> None:
    with closing(RetainedKv()) as kept:
        with closing(SharedSegment.create("kv", 4096)) as segment:
            address = segment.address
        assert not kept.keep(0, address)
        assert kept.of_rank(0) is None
