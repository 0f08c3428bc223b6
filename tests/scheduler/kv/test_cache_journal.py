"""Reports reproduce the set of cached prefixes, and gateways compute the same hashes."""

from typing import Any

import numpy as np
import pytest
from driver import Driver
from fakes import VOCAB_SIZE, small_config
from hypothesis import given
from hypothesis import strategies as st

from quire.proto.digests import CACHE_HASH_BYTES, make_root, prefix_hashes
from quire.proto.stream import CacheReport
from quire.scheduler.kv.cache_journal import CacheJournal


class Follower:
    """A gateway's copy of a replica's cache."""

    def __init__(self) -> None:
        self.version = 0
        self.known: set[bytes] = set()

    def apply(self, report: CacheReport) -> None:
        if report.since == 0:
            self.known = set()
        else:
            assert report.since == self.version
        self.known |= set(split(report.added))
        self.known -= set(split(report.removed))
        self.version = report.version


def split(hashes: bytes) -> list[bytes]:
    return [hashes[start : start + CACHE_HASH_BYTES] for start in range(0, len(hashes), CACHE_HASH_BYTES)]


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")[::-1]


def name(number: int) -> bytes:
    return digest(number)[:CACHE_HASH_BYTES]


@given(st.lists(st.tuples(st.sampled_from("+-?"), st.integers(0, 7)), max_size=120), st.integers(1, 40))
def test_reports_reproduce_the_cached_set(events: list[tuple[str, int]], max_changes: int) -> None:
    journal, follower = CacheJournal(max_changes=max_changes), Follower()
    places: list[int] = []
    for kind, number in events:
        if kind == "+":
            journal.add([digest(number)])
            places.append(number)
        elif kind == "-" and number in places:
            journal.remove(digest(number))
            places.remove(number)
        elif kind == "?":
            follower.apply(journal.report(follower.version))
            assert follower.known == {name(number) for number in places}
    journal.check_integrity([digest(number) for number in places])


def test_full_report_is_bounded_to_the_newest_hashes() -> None:
    journal = CacheJournal(max_hashes=3)
    for number in range(10):
        journal.add([digest(number)])
    report = journal.report(0)
    assert (report.since, report.version) == (0, 10)
    assert set(split(report.added)) == {name(7), name(8), name(9)}


def test_unknown_version_gets_a_full_report() -> None:
    journal = CacheJournal()
    for number in range(4):
        journal.add([digest(number)])
    assert journal.report(4) == CacheReport(4, 4, b"", b"")
    assert journal.report(99).since == 0
    assert len(split(journal.report(99).added)) == 4


@pytest.mark.parametrize("num_host_blocks", [0, 30])
@pytest.mark.parametrize("owner", [{}, {"tenant": "gold"}, {"tenant": "gold", "prefix_pool": "metals"}])
def test_reported_hashes_equal_those_of_gateways(num_host_blocks: int, owner: dict[str, Any]) -> None:
    root = make_root("fake", b"salt", tenant=owner.get("tenant", ""), pool=owner.get("prefix_pool", ""))
    driver = Driver(small_config(num_blocks=12, num_host_blocks=num_host_blocks))
    follower = Follower()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCAB_SIZE, 13).tolist() for _ in range(6)]
    for handle, prompt in enumerate(prompts):
        driver.add(handle, prompt, max_tokens=1, salt=b"salt", ignore_eos=True, **owner)
        driver.run()
        follower.apply(driver.scheduler.blocks.journal.report(follower.version))
        hashes = prefix_hashes(prompt, 4, root)
        assert len(hashes) == 3
        assert set(hashes) <= follower.known
        assert not set(prefix_hashes(prompt, 4, make_root("fake"))) & follower.known
    first = set(prefix_hashes(prompts[0], 4, root))
    assert (first <= follower.known) == (num_host_blocks > 0)  # 6 prompts of 3 blocks do not fit in 11
