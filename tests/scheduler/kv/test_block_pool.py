import pytest

from quire.scheduler.kv.block_pool import BlockPool


def make_pool(num_blocks: int = 6) -> tuple[BlockPool, list[int]]:
    evicted: list[int] = []
    return BlockPool(num_blocks, evicted.append), evicted


def test_allocate_never_returns_the_scratch_block() -> None:
    pool, _ = make_pool(6)
    assert pool.num_free == 5
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0


def test_block_is_free_after_its_last_reference() -> None:
    pool, _ = make_pool()
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.release([block], fence_step=None)
    assert pool.num_held == 1
    pool.release([block], fence_step=None)
    assert pool.num_held == 0
    pool.check_integrity({})


def test_release_of_a_free_block_fails() -> None:
    pool, _ = make_pool()
    (block,) = pool.allocate(1)
    pool.release([block], fence_step=None)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([block], fence_step=None)


def test_cached_blocks_are_evicted_last_and_oldest_first() -> None:
    pool, evicted = make_pool(6)
    kept = pool.allocate(3)
    for block in kept:
        pool.keep_content([block])
    pool.release(kept[::-1], fence_step=None)
    assert pool.num_cached == 3
    assert pool.num_free == 5
    pool.allocate(2)
    assert evicted == []
    pool.allocate(2)
    assert evicted == [kept[2], kept[1]]


def test_shared_cached_block_leaves_the_free_queue() -> None:
    pool, evicted = make_pool(3)
    kept = pool.allocate(2)
    for block in kept:
        pool.keep_content([block])
    pool.release(kept, fence_step=None)
    pool.share([kept[0]])
    assert pool.allocate(1) == [kept[1]]
    assert evicted == [kept[1]]
    pool.check_integrity({kept[0]: 1, kept[1]: 1})


def test_fenced_block_is_free_after_its_step() -> None:
    pool, _ = make_pool(3)
    blocks = pool.allocate(2)
    pool.release(blocks, fence_step=7)
    assert pool.num_free == 0
    assert pool.num_fenced == 2
    pool.free_fenced(6)
    assert pool.num_free == 0
    pool.free_fenced(7)
    assert pool.num_free == 2


def test_fenced_block_shared_again_is_not_freed_by_the_old_fence() -> None:
    pool, _ = make_pool(3)
    (block,) = pool.allocate(1)
    pool.keep_content([block])
    pool.release([block], fence_step=3)
    pool.share([block])
    pool.free_fenced(3)
    assert pool.num_held == 1
    pool.release([block], fence_step=5)
    pool.free_fenced(4)
    assert pool.num_fenced == 1
    pool.free_fenced(5)
    assert pool.num_cached == 1
    pool.check_integrity({})


def test_check_integrity_finds_a_leaked_reference() -> None:
    pool, _ = make_pool()
    pool.allocate(1)
    with pytest.raises(AssertionError, match="block 1 has 1 references, the tables have 0"):
        pool.check_integrity({})


def test_large_pool_is_made_without_listing_its_blocks() -> None:
    pool, _ = make_pool(50_000_000)
    assert pool.num_free == 49_999_999
    assert pool.allocate(2) == [1, 2]


def test_partitions_allocate_and_evict_their_own_blocks() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, evicted.append, num_partitions=3)
    assert (pool.num_blocks, pool.num_free, pool.num_free_in(1)) == (9, 9, 3)
    kept = pool.allocate(3, 1)
    assert sorted(kept) == [5, 6, 7]
    assert [pool.partition_of(block) for block in (3, 4, 7, 8)] == [0, 1, 1, 2]
    for block in kept:
        pool.keep_content([block])
    pool.release(kept, fence_step=None)
    assert sorted(pool.allocate(3, 2)) == [9, 10, 11]
    assert evicted == []
    assert pool.allocate(1, 1) == evicted == [kept[0]]
    with pytest.raises(AssertionError, match="1 blocks requested, 0 are free"):
        pool.allocate(1, 2)


def test_fenced_blocks_count_in_their_partition() -> None:
    pool = BlockPool(4, lambda block_id: None, num_partitions=2)
    first, second = pool.allocate(2, 0), pool.allocate(1, 1)
    pool.release([*first, *second], fence_step=3)
    assert [pool.num_free_in(0), pool.num_free_in(1)] == [1, 2]
    assert [pool.num_unheld_in(0), pool.num_unheld_in(1)] == [3, 3]
    pool.fence_unheld(first, 4)
    pool.free_fenced(3)
    assert [pool.num_free_in(0), pool.num_free_in(1)] == [1, 3]
    pool.check_integrity({})
    pool.share(first)
    assert pool.num_unheld_in(0) == 1
    pool.check_integrity(dict.fromkeys(first, 1))
