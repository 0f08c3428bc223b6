import gc
import tracemalloc
from array import array

import pytest

from quire.proto.digests import child_digest, make_root
from quire.proto.sampling import SamplingParams
from quire.scheduler.kv.cache_events import CacheKey
from quire.scheduler.kv.prefix_cache import PrefixCache
from quire.scheduler.sequences.sequence import Sequence

ROOT = make_root("model")


def chain(cache: PrefixCache, tokens: list[int], num_blocks: int, root: bytes = ROOT) -> list[bytes]:
    sequence = make_sequence(tokens, root)
    cache.extend(sequence, num_blocks)
    return sequence.block_digests


def make_sequence(tokens: list[int], root: bytes = ROOT) -> Sequence:
    sampling = SamplingParams()
    return Sequence(
        1, 1, b"gateway", 1, "request", sampling, 0, len(tokens), 99, array("i", tokens), (), 0.0, root
    )


def key(parent: bytes, tokens: list[int]) -> CacheKey:
    raw = array("i", tokens).tobytes()
    return child_digest(parent, raw), parent, raw


def test_block_is_found_by_its_whole_prefix() -> None:
    cache = PrefixCache(2)
    first, second = chain(cache, [1, 2, 3, 4], 2)
    assert cache.insert(key(ROOT, [1, 2]), 10)
    assert cache.insert(key(first, [3, 4]), 11)
    assert (cache.find(first), cache.find(second)) == (10, 11)
    assert cache.find(chain(cache, [3, 4], 1)[0]) is None


def test_equal_blocks_after_different_prefixes_differ() -> None:
    cache = PrefixCache(2)
    assert chain(cache, [1, 2, 7, 7], 2)[1] != chain(cache, [2, 1, 7, 7], 2)[1]


def test_models_salts_adapters_tenants_and_pools_have_different_roots() -> None:
    named = [("m", b"", ""), ("m", b"s", ""), ("m", b"", "s"), ("ms", b"", ""), ("m", b"", "t")]
    roots = [make_root(*names) for names in named]
    roots += [
        make_root("m", tenant="s"),
        make_root("m", tenant="t"),
        make_root("m", pool="s"),
        make_root("m", pool="t"),
    ]
    assert len(set(roots)) == len(roots)


def test_tenants_of_a_pool_have_one_root() -> None:
    assert make_root("m", tenant="gold", pool="metals") == make_root("m", tenant="tin", pool="metals")


def test_extend_adds_missing_digests_only() -> None:
    cache = PrefixCache(2)
    sequence = make_sequence([1, 2, 3, 4])
    cache.extend(sequence, 1)
    first = list(sequence.block_digests)
    cache.extend(sequence, 2)
    assert sequence.block_digests[:1] == first
    assert sequence.block_digests == chain(cache, [1, 2, 3, 4], 2)


def test_insert_keeps_the_first_block_until_it_is_forgotten() -> None:
    cache = PrefixCache(2)
    entry = key(ROOT, [1, 2])
    assert cache.insert(entry, 5)
    assert not cache.insert(entry, 6)
    assert cache.find(entry[0]) == 5
    cache.forget(5)
    assert cache.find(entry[0]) is None
    assert cache.closest_child(ROOT, array("i", [1, 2])) is None
    assert len(cache) == 0
    cache.check_integrity()


def test_closest_child_shares_the_most_first_tokens() -> None:
    cache = PrefixCache(4)
    cache.insert(key(ROOT, [1, 2, 9, 9]), 5)
    cache.insert(key(ROOT, [1, 2, 3]), 6)  # a part-filled block
    cache.insert(key(ROOT, [7, 7, 7, 7]), 7)
    assert cache.closest_child(ROOT, array("i", [1, 2, 3, 4])) == (6, 3)
    assert cache.closest_child(ROOT, array("i", [1, 2, 9, 4])) == (5, 3)
    assert cache.closest_child(ROOT, array("i", [1])) == (5, 1)
    assert cache.closest_child(ROOT, array("i", [8, 8])) is None


def test_closest_child_has_a_quarter_of_a_block_in_common() -> None:
    cache = PrefixCache(8)
    cache.insert(key(ROOT, [1, 2, 3, 4, 5, 6, 7, 8]), 5)
    cache.insert(key(ROOT, [1]), 6)
    assert cache.closest_child(ROOT, array("i", [1, 2, 9])) == (5, 2)
    assert cache.closest_child(ROOT, array("i", [1, 9, 9])) is None
    assert cache.closest_child(ROOT, array("i", [1])) is None


@pytest.mark.parametrize("num_common", [1, 9], ids=["first token", "system prompt"])
def test_block_with_many_siblings_is_added_and_removed_without_a_copy_of_their_list(num_common: int) -> None:
    def sibling(index: int) -> CacheKey:
        return key(ROOT, [*range(num_common), *[100 + index] * (16 - num_common)])

    cache = PrefixCache(16)
    for index in range(5000):
        cache.insert(sibling(index), index)
    peaks = []
    tracemalloc.start()
    try:
        for index in range(9):
            entry = sibling(5000 + index)
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            cache.insert(entry, 5000 + index)
            cache.forget(index)
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert sorted(peaks)[4] < 2000  # a list of 5,000 blocks takes 40,000 bytes
    cache.check_integrity()


def test_cached_blocks_are_not_visited_by_the_garbage_collector() -> None:
    cache = PrefixCache(16)
    gc.collect()
    before = len(gc.get_objects())
    for index in range(2000):
        cache.insert(key(ROOT, [index] * 16), index)
    gc.collect()
    assert len(gc.get_objects()) - before < 20
