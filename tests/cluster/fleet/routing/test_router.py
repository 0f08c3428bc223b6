"""The router's choices, with an injected random generator."""

import os
import random
import sys
from array import array
from collections.abc import Mapping
from types import FrameType

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.cluster.fleet.routing.router import KV_SLACK, QUEUE_SLACK_TOKENS, ReplicaLoad, Router
from quire.proto.digests import make_root, prefix_hashes
from quire.proto.sampling import SamplingParams
from quire.proto.stream import CacheReport
from quire.scheduler.kv.cache_journal import CacheJournal
from quire.scheduler.kv.prefix_cache import PrefixCache
from quire.scheduler.sequences.sequence import Sequence

BLOCK_SIZE = 16
IDLE = ReplicaLoad(0, 0.0)


def make_hashes(count: int) -> list[bytes]:
    return [os.urandom(8) for _ in range(count)]


def make_router(seed: int = 0, **options: int) -> Router:
    return Router(BLOCK_SIZE, random.Random(seed), **options)


def choose(router: Router, hashes: list[bytes], salt: bytes, loads: Mapping[str, ReplicaLoad]) -> str:
    router.set_loads(loads)
    chosen = router.choose(hashes, salt)
    assert chosen is not None
    return chosen


def report(
    router: Router, replica_id: str, added: list[bytes], removed: list[bytes] | None = None, since: int = 0
) -> None:
    router.apply_report(replica_id, CacheReport(since + 1, since, b"".join(added), b"".join(removed or [])))


class TestCachedPrefix:
    def test_longest_prefix_wins(self) -> None:
        router, hashes = make_router(), make_hashes(10)
        report(router, "short", hashes[:3])
        report(router, "long", hashes[:7])
        assert choose(router, hashes, b"", {"short": IDLE, "none": IDLE, "long": IDLE}) == "long"

    def test_gap_ends_the_prefix(self) -> None:
        router, hashes = make_router(), make_hashes(10)
        report(router, "gap", hashes[:2] + hashes[3:])
        report(router, "whole", hashes[:3])
        assert router.num_cached_blocks("gap", hashes) == 2
        assert choose(router, hashes, b"", {"gap": IDLE, "whole": IDLE}) == "whole"

    def test_window_of_a_prefix_suffices_if_all_layers_have_one(self) -> None:
        router, hashes = make_router(), make_hashes(10)
        router.apply_report("windowed", CacheReport(1, 0, b"".join(hashes[4:7] + hashes[8:9]), b"", 3))
        assert router.num_cached_blocks("windowed", hashes) == 7
        assert router.num_cached_blocks("windowed", hashes[:6]) == 0
        router.apply_report("windowed", CacheReport(2, 1, hashes[0], b"", 3))
        assert router.num_cached_blocks("windowed", hashes[:6]) == 1
        report(router, "whole", hashes[:6])
        assert choose(router, hashes, b"", {"whole": IDLE, "windowed": IDLE}) == "windowed"

    def test_submitted_prefix_counts_as_cached(self) -> None:
        router, hashes = make_router(), make_hashes(8)
        loads = {f"r{i}": IDLE for i in range(8)}
        first = choose(router, hashes, b"", loads)
        router.record_submit(first, hashes)
        assert [choose(router, hashes, b"", loads) for _ in range(20)] == [first] * 20

    def test_reports_add_and_remove_hashes(self) -> None:
        router, hashes = make_router(), make_hashes(6)
        report(router, "a", hashes[:3])
        report(router, "a", hashes[3:], since=1)
        assert router.num_cached_blocks("a", hashes) == 6
        report(router, "a", [], hashes[4:], since=2)
        assert router.num_cached_blocks("a", hashes) == 4

    def test_full_report_replaces_the_cache(self) -> None:
        router, old, new = make_router(), make_hashes(4), make_hashes(4)
        report(router, "a", old)
        report(router, "a", new)
        assert (router.num_cached_blocks("a", old), router.num_cached_blocks("a", new)) == (0, 4)

    def test_removed_replica_has_no_cache(self) -> None:
        router, hashes = make_router(), make_hashes(4)
        report(router, "a", hashes)
        router.remove_replica("a")
        router.remove_replica("a")
        assert router.num_cached_blocks("a", hashes) == 0

    def test_only_given_replicas_are_chosen(self) -> None:
        router, hashes = make_router(), make_hashes(4)
        report(router, "draining", hashes)
        assert choose(router, hashes, b"", {"other": IDLE}) == "other"

    def test_hashes_are_bounded_to_the_most_recent(self) -> None:
        router, hashes = make_router(max_hashes=100), make_hashes(250)
        for start in range(0, 250, 10):
            router.record_submit("a", hashes[start : start + 10])
        assert router.num_cached_blocks("a", hashes[150:]) == 100
        assert router.num_cached_blocks("a", hashes[:150]) == 0

    def test_hashes_match_the_reports_of_replicas(self) -> None:
        """Hashes of a prompt equal those that a replica's own cache and journal report."""
        tokens = np.arange(5 * BLOCK_SIZE + 3, dtype=np.int32)
        journal = CacheJournal()
        cache, parent = PrefixCache(BLOCK_SIZE, journal), make_root("m", b"salt")
        known = array("i", tokens.tolist())
        sequence = Sequence(
            1, 1, b"gateway", 1, "request", SamplingParams(), 0, len(known), 99, known, (), 0.0, parent
        )
        cache.extend(sequence, 4)
        for block_id, digest in enumerate(sequence.block_digests):
            content = tokens[block_id * BLOCK_SIZE : (block_id + 1) * BLOCK_SIZE].tobytes()
            cache.insert((digest, parent, content), block_id)
            parent = digest
        router = make_router()
        router.apply_report("a", journal.report(0))
        assert router.num_cached_blocks("a", prefix_hashes(tokens, BLOCK_SIZE, make_root("m", b"salt"))) == 4
        assert router.num_cached_blocks("a", prefix_hashes(tokens, BLOCK_SIZE, make_root("m", b"other"))) == 0

    def test_slot_of_a_removed_replica_is_used_again_without_its_cache(self) -> None:
        router, old, new = make_router(), make_hashes(4), make_hashes(4)
        router.apply_report("a", CacheReport(1, 0, b"".join(old), b"", 2))
        report(router, "b", old[:1])
        router.set_load("a", IDLE)
        router.remove_replica("a")
        report(router, "c", new)
        assert router.num_cached_blocks("c", old) == 0
        assert router.num_cached_blocks("c", new) == 4
        assert router.num_cached_blocks("b", old) == 1
        assert choose(router, old, b"", {"b": IDLE, "c": IDLE}) == "b"

    def test_no_replica_is_chosen_if_none_takes_requests(self) -> None:
        router, hashes = make_router(), make_hashes(2)
        report(router, "a", hashes)
        assert router.choose(hashes, b"") is None
        router.set_load("a", IDLE)
        assert router.choose(hashes, b"") == "a"
        router.set_load("a", None)
        assert router.choose(hashes, b"salt") is None


def num_calls(router: Router, hashes: list[bytes], salt: bytes) -> int:
    """Return the functions, of Python and of C, that a choice calls."""
    count = 0

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        router.choose(hashes, salt)
    finally:
        sys.setprofile(None)
    return count


def test_choice_takes_as_many_operations_with_many_replicas() -> None:
    hashes, counts = make_hashes(20), []
    for num_replicas in (5, 500):
        router = make_router()
        for number in range(num_replicas):
            report(router, f"r{number}", hashes)
            router.set_load(f"r{number}", IDLE)
        counts.append([num_calls(router, hashes, salt) for salt in (b"", b"salt")])
        counts[-1].append(num_calls(router, [], b"salt"))
    # The random choice of two may draw again.
    assert all(abs(many - few) < 10 for few, many in zip(*counts, strict=True)), counts


class TestLoad:
    def test_queue_longer_than_the_saving_is_avoided(self) -> None:
        router, hashes = make_router(), make_hashes(400)
        report(router, "cached", hashes)
        saved = 400 * BLOCK_SIZE
        fits = {"cached": ReplicaLoad(saved, 0.0), "idle": IDLE}
        too_long = {"cached": ReplicaLoad(saved + 1, 0.0), "idle": IDLE}
        assert choose(router, hashes, b"", fits) == "cached"
        assert choose(router, hashes, b"", too_long) == "idle"

    def test_full_kv_memory_is_avoided(self) -> None:
        router, hashes = make_router(), make_hashes(4)
        report(router, "cached", hashes)
        assert choose(router, hashes, b"", {"cached": ReplicaLoad(0, KV_SLACK), "idle": IDLE}) == "cached"
        assert (
            choose(router, hashes, b"", {"cached": ReplicaLoad(0, KV_SLACK + 0.01), "idle": IDLE}) == "idle"
        )

    def test_less_loaded_of_two_is_chosen(self) -> None:
        router = make_router()
        loads = {"busy": ReplicaLoad(QUEUE_SLACK_TOKENS, 0.5), "b": IDLE, "c": IDLE}
        chosen = [choose(router, [], b"", loads) for _ in range(60)]
        assert set(chosen) == {"b", "c"}, "the busiest of three is never the less loaded of two"

    def test_kv_use_decides_between_equal_queues(self) -> None:
        loads = {"full": ReplicaLoad(10, 0.15), "empty": ReplicaLoad(20, 0.05)}
        assert choose(make_router(), [], b"", loads) == "empty"

    def test_replicas_with_the_same_prefix_share_requests(self) -> None:
        router, hashes = make_router(), make_hashes(4)
        for name in ("a", "b"):
            report(router, name, hashes)
        chosen = {choose(router, hashes, b"", {"a": IDLE, "b": IDLE, "c": IDLE}) for _ in range(40)}
        assert chosen == {"a", "b"}

    def test_popular_prefix_spreads_over_replicas(self) -> None:
        router, hashes = make_router(), make_hashes(2)
        queued = dict.fromkeys(("a", "b", "c", "d"), 0)
        for _ in range(200):
            loads = {name: ReplicaLoad(tokens, 0.0) for name, tokens in queued.items()}
            chosen = choose(router, hashes, b"", loads)
            router.record_submit(chosen, hashes)
            queued[chosen] += 500
        assert max(queued.values()) - min(queued.values()) <= 2 * QUEUE_SLACK_TOKENS

    def test_choices_are_reproducible_with_a_seed(self) -> None:
        loads = {f"r{i}": IDLE for i in range(5)}
        runs = [[choose(make_router(3), [], b"", loads) for _ in range(5)] for _ in range(2)]
        assert runs[0] == runs[1]


SIX = {f"r{i}": IDLE for i in range(6)}


class TestTenants:
    def test_tenant_stays_at_one_replica(self) -> None:
        router = make_router()
        for tenant in range(20):
            assert len({choose(router, make_hashes(3), b"%d" % tenant, SIX) for _ in range(5)}) == 1

    def test_tenants_are_spread_over_replicas(self) -> None:
        router = make_router()
        chosen = {choose(router, [], b"%d" % tenant, SIX) for tenant in range(100)}
        assert chosen == set(SIX)

    def test_only_the_tenants_of_a_lost_replica_move(self) -> None:
        router, salts = make_router(), [b"%d" % tenant for tenant in range(100)]
        before = {salt: choose(router, [], salt, SIX) for salt in salts}
        left = {name: load for name, load in SIX.items() if name != "r2"}
        moved = {salt for salt in salts if choose(router, [], salt, left) != before[salt]}
        assert moved == {salt for salt in salts if before[salt] == "r2"}

    def test_tenant_avoids_an_overloaded_replica(self) -> None:
        router = make_router()
        preferred = choose(router, [], b"tenant", SIX)
        loads = SIX | {preferred: ReplicaLoad(QUEUE_SLACK_TOKENS + 1, 0.0)}
        assert preferred not in {choose(router, [], b"tenant", loads) for _ in range(50)}


@given(st.data())
def test_overloaded_replica_is_never_chosen(data: st.DataObject) -> None:
    names = [f"r{i}" for i in range(data.draw(st.integers(1, 6)))]
    loads = {
        name: ReplicaLoad(data.draw(st.integers(0, 50_000)), data.draw(st.floats(0, 1))) for name in names
    }
    hashes = [bytes([i]) * 8 for i in range(data.draw(st.integers(0, 60)))]
    router = make_router(data.draw(st.integers(0, 3)))
    for name in names:
        report(router, name, hashes[: data.draw(st.integers(0, len(hashes)))])
    chosen = choose(router, hashes, data.draw(st.sampled_from([b"", b"a", b"b"])), loads)
    longest = max(router.num_cached_blocks(name, hashes) for name in names)
    if router.num_cached_blocks(chosen, hashes) == longest > 0 or len(names) == 1:
        return
    # Another replica was chosen: every replica with the longest prefix is overloaded.
    queued = min(load.queued_tokens for load in loads.values())
    kv_use = min(load.kv_use for load in loads.values())
    for name in names:
        if longest and router.num_cached_blocks(name, hashes) == longest:
            slack = max(longest * BLOCK_SIZE, QUEUE_SLACK_TOKENS)
            assert loads[name].queued_tokens > queued + slack or loads[name].kv_use > kv_use + KV_SLACK


@given(st.data())
def test_index_of_all_replicas_finds_what_each_of_them_has(data: st.DataObject) -> None:
    """The shared index against a search in each replica's hashes."""
    hashes = [bytes([number]) * 8 for number in range(12)]
    window_blocks = data.draw(st.sampled_from([0, 1, 2, 3, 5]))
    subsets = st.lists(st.sampled_from(hashes), unique=True)
    router, held = make_router(), dict[str, set[bytes]]()
    for _ in range(data.draw(st.integers(1, 12))):
        name = data.draw(st.sampled_from(["a", "b", "c"]))
        if data.draw(st.integers(0, 4)) == 0:
            router.remove_replica(name)
            held.pop(name, None)
            continue
        since, added, removed = data.draw(st.integers(0, 1)), data.draw(subsets), data.draw(subsets)
        kept = held.get(name, set()) if since else set()
        held[name] = (kept - set(removed)) | set(added)
        content = b"".join(added), b"".join(removed) if since else b""
        router.apply_report(name, CacheReport(since + 1, since, *content, window_blocks))
    for name in ("a", "b", "c"):
        has = [block_hash in held.get(name, set()) for block_hash in hashes]
        lengths = (
            end
            for end in range(1, len(hashes) + 1)
            if all(has[max(0, end - window_blocks) if window_blocks else 0 : end])
        )
        assert router.num_cached_blocks(name, hashes) == max(lengths, default=0)
