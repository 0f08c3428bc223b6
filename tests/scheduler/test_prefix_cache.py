from array import array

from quire.scheduler.prefix_cache import PrefixCache


def chain(cache: PrefixCache, tokens: list[int], num_blocks: int) -> list[bytes]:
    digests: list[bytes] = []
    cache.extend(digests, array("i", tokens), num_blocks)
    return digests


def test_match_is_the_longest_prefix():
    cache = PrefixCache(2, b"model")
    digests = chain(cache, [1, 2, 3, 4, 5, 6], 3)
    for block_id, digest in enumerate(digests, start=10):
        assert cache.insert(digest, block_id)
    other = chain(cache, [1, 2, 3, 4, 9, 9], 3)
    assert cache.match(other) == [10, 11]
    assert cache.match(chain(cache, [3, 4], 1)) == []


def test_equal_blocks_after_different_beginnings_differ():
    cache = PrefixCache(2, b"model")
    assert chain(cache, [1, 2, 7, 7], 2)[1] != chain(cache, [2, 1, 7, 7], 2)[1]


def test_different_roots_share_nothing():
    assert chain(PrefixCache(2, b"a"), [1, 2], 1) != chain(PrefixCache(2, b"b"), [1, 2], 1)


def test_extend_only_adds_what_is_missing():
    cache = PrefixCache(2, b"model")
    tokens = array("i", [1, 2, 3, 4])
    digests: list[bytes] = []
    cache.extend(digests, tokens, 1)
    first = list(digests)
    cache.extend(digests, tokens, 2)
    assert digests[:1] == first
    assert digests == chain(cache, [1, 2, 3, 4], 2)


def test_the_first_block_with_a_content_stays_and_eviction_forgets_it():
    cache = PrefixCache(2, b"model")
    (digest,) = chain(cache, [1, 2], 1)
    assert cache.insert(digest, 5)
    assert not cache.insert(digest, 6)
    assert cache.match([digest]) == [5]
    cache.forget(5)
    assert cache.match([digest]) == []
    assert len(cache) == 0
    cache.check_integrity()
