"""RetainedWeights: segments stay open in the scheduler's process until other ones take their place."""

from __future__ import annotations

from contextlib import closing

import pytest

from quire.cluster.fleet.replica.retained_memory import RetainedWeights
from quire.worker.memory.shared_segment import SegmentAddress, SharedSegment


def make_segment(content: bytes) -> SharedSegment:
    segment = SharedSegment.create("test", 4096)
    segment.write(content, 0)
    return segment


def read(address: SegmentAddress) -> bytes:
    with closing(SharedSegment.open(address)) as segment, segment.map_private() as memory:
        return memory[:5]


def test_kept_segments_stay_open_after_their_rank_closed_them() -> None:
    with closing(RetainedWeights()) as kept:
        for rank, content in enumerate((b"zero_", b"first")):
            with closing(make_segment(content)) as segment:
                kept.keep(rank, [segment.address])
        assert [read(address) for rank in range(3) for address in kept.of_rank(rank)] == [b"zero_", b"first"]


def test_kept_segments_are_closed_when_others_take_their_place_and_at_the_end() -> None:
    kept = RetainedWeights()
    with closing(make_segment(b"older")) as older, closing(make_segment(b"newer")) as newer:
        kept.keep(0, [older.address])
        (before,) = kept.of_rank(0)
        kept.keep(0, [newer.address])
        (after,) = kept.of_rank(0)
        assert read(after) == b"newer"
        kept.keep(1, [older.address, newer.address])
        kept.close()
        kept.close()
        kept.keep(2, [newer.address])
        assert [kept.of_rank(rank) for rank in range(3)] == [()] * 3
    for address in (before, after):
        with pytest.raises(FileNotFoundError):
            read(address)


def test_segment_opened_again_by_the_next_rank_is_kept() -> None:
    with closing(RetainedWeights()) as kept:
        with closing(make_segment(b"first")) as segment:
            kept.keep(0, [segment.address])
        (address,) = kept.of_rank(0)
        with closing(SharedSegment.open(address)) as inherited:
            kept.keep(0, [inherited.address])
        (address,) = kept.of_rank(0)
        assert read(address) == b"first"


def test_segment_of_another_node_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with closing(RetainedWeights()) as kept, closing(make_segment(b"local")) as segment:
        elsewhere = SegmentAddress(segment.address.pid, segment.address.descriptor, "quire-weights-0", 4096)
        kept.keep(0, [elsewhere, segment.address])
        assert len(kept.of_rank(0)) == 1
    assert "the weights of rank 0 are not kept" in caplog.text
