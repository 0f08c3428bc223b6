"""Shard: the parts of a dimension."""

from __future__ import annotations

import pytest

from quire.proto.model.parallel_split import own_indices
from quire.worker.comm.shard import Shard


@pytest.mark.parametrize(("full_len", "size"), [(8, 4), (10, 4), (3, 2), (5, 1)])
def test_shards_cover_dimension_once(full_len: int, size: int) -> None:
    shards = [Shard(rank, size, full_len) for rank in range(size)]
    assert [place for shard in shards for place in range(shard.start, shard.end)] == list(range(full_len))
    assert all(len(shard) <= shard.padded_len for shard in shards)


@pytest.mark.parametrize(
    ("count", "size", "lengths"), [(8, 4, [2, 2, 2, 2]), (6, 4, [2, 2, 1, 1]), (3, 2, [2, 1])]
)
def test_ranks_hold_each_whole_thing_once(count: int, size: int, lengths: list[int]) -> None:
    parts = [own_indices(rank, size, count) for rank in range(size)]
    assert [index for part in parts for index in part] == list(range(count))
    assert [len(part) for part in parts] == lengths
