"""StoredTier: prefixes are read from files while a request waits; failed, torn and late reads cost a computation."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from driver import Driver
from fakes import IMAGE_TOKEN, images_of, oracle, random_prompt, see, small_config

from quire.proto.errors import ConfigError
from quire.proto.lora import LoraReference
from quire.proto.media import MediaItem
from quire.proto.stored_kv import StoredReport, block_key, is_state
from quire.scheduler.kv.cache_events import BlocksStored, CacheKey
from quire.scheduler.kv.state_slots import StateSlots
from quire.scheduler.kv.stored_tier import StoredTier
from quire.scheduler.sequences.sequence import Sequence

PROMPT = random_prompt(33)
NUM_CACHED = 32


def make_driver(**settings: Any) -> Driver:
    config = {"num_blocks": 64, "num_host_blocks": 40, "kv_disk": "/nowhere:64MiB", **settings}
    return Driver(small_config(**config))


def run(driver: Driver, handle: int, prompt: list[int] = PROMPT, **settings: Any) -> int:
    """Run a request to its end, check its output, and return its cached tokens."""
    driver.add(handle, prompt, max_tokens=4, **settings)
    driver.run()
    assert driver.outputs[handle] == oracle(prompt, 4)
    return driver.finishes[handle].num_cached_tokens


def store_and_restart(driver: Driver) -> None:
    """Let idle time pass, in which blocks are written, and continue with a new scheduler and group."""
    driver.now += 1.0
    driver.run()
    assert driver.scheduler.blocks.stored.is_settled
    driver.replace()
    driver.run()


@pytest.fixture
def restarted() -> Driver:
    driver = make_driver()
    assert run(driver, 0) == 0
    store_and_restart(driver)
    assert driver.scheduler.blocks.stored.num_blocks_in[0] >= NUM_CACHED // 4
    return driver


@pytest.mark.parametrize("layer_windows", [(0,), (0, 9, 9), (6,)])
def test_prefix_is_found_after_a_restart(layer_windows: tuple[int, ...]) -> None:
    driver = make_driver(layer_windows=layer_windows, num_blocks=80, num_host_blocks=80)
    run(driver, 0)
    store_and_restart(driver)
    assert run(driver, 1) == NUM_CACHED
    assert driver.scheduler.blocks.stored.num_hit_tokens > 0


def test_blocks_with_images_are_found_for_the_same_image() -> None:
    first, second = b"1" * 16, b"2" * 16
    settings: dict[str, Any] = {
        "num_blocks": 64,
        "num_host_blocks": 40,
        "kv_disk": "/nowhere:64MiB",
        "eos": (),
    }
    driver = Driver(small_config(**settings, encoder_cache_rows=30), images=images_of([first, second]))
    prompt = [5] * 6 + [IMAGE_TOKEN] * 8 + [6] * 19

    def cached_tokens(handle: int, image: bytes) -> int:
        items = (MediaItem(image, 6, 8, 8, num_bytes=16),)
        assert driver.add(handle, prompt, b"gateway", media=items, max_tokens=4) is None
        driver.run()
        assert driver.outputs[handle] == oracle(see(prompt, items), 4, ())
        return driver.finishes[handle].num_cached_tokens

    assert cached_tokens(0, first) == 0
    store_and_restart(driver)
    assert cached_tokens(1, second) == 4  # up to the image
    assert cached_tokens(2, first) == NUM_CACHED


def test_blocks_of_an_adapter_are_found_by_its_content() -> None:
    driver = make_driver(enable_lora=True)
    poet = LoraReference("poet", "/a", "1")
    run(driver, 0, lora=poet)
    store_and_restart(driver)
    assert not driver.files.blocks, "blocks without a name that lasts were stored"
    run(driver, 1, random_prompt(5, 1), lora=poet)  # the ranks read the adapter
    assert driver.scheduler.lora is not None
    content = driver.scheduler.lora.content_of(poet)
    assert run(driver, 2, lora=replace(poet, content=content)) == 0
    store_and_restart(driver)
    prose = LoraReference("prose", "/a", "2", content)
    run(driver, 3, random_prompt(5, 1), lora=prose)
    assert run(driver, 4, lora=prose) == NUM_CACHED, "the same files under another name are another adapter"
    other = LoraReference("prose", "/b", "3", content)  # what it has here is not what a gateway says
    run(driver, 5, random_prompt(5, 1), lora=other)
    assert run(driver, 6, lora=other) == 0


def test_blocks_are_written_in_idle_time_only() -> None:
    driver = make_driver()
    run(driver, 0)
    assert not driver.files.blocks
    driver.now += 0.1
    driver.run()
    assert not driver.files.blocks
    driver.now += 1.0
    driver.run()
    assert driver.files.blocks


def test_other_salt_finds_nothing(restarted: Driver) -> None:
    assert run(restarted, 1, salt=b"other") == 0
    assert restarted.scheduler.blocks.stored.num_read_blocks == 0


@pytest.mark.parametrize("fault", ["fail", "torn"])
def test_failed_read_is_computed(restarted: Driver, fault: str) -> None:
    restarted.files.faults = {fault}
    assert run(restarted, 1) == 0
    stored = restarted.scheduler.blocks.stored
    assert stored.num_failed_reads == NUM_CACHED // 4
    assert (stored.num_corrupt_blocks > 0) == (fault == "torn")


def test_late_read_is_not_waited_for(restarted: Driver) -> None:
    stored = restarted.scheduler.blocks.stored
    restarted.files.faults = {"late"}
    restarted.add(1, PROMPT, max_tokens=4)
    for _ in range(5):
        restarted.step()
    assert not restarted.outputs[1]  # it waits
    restarted.now += 3.0
    for _ in range(10):
        restarted.step()
    assert restarted.outputs[1] == oracle(PROMPT, 4)
    assert restarted.finishes[1].num_cached_tokens == 0
    assert stored.num_late_reads == 1
    assert stored.held_on_host  # the ranks may still write into them
    restarted.files.faults = set()
    restarted.run()
    assert not stored.held_on_host


def test_requests_with_one_prefix_share_a_read(restarted: Driver) -> None:
    for handle in (1, 2):
        restarted.add(handle, PROMPT, max_tokens=4)
    restarted.run()
    for handle in (1, 2):
        assert restarted.finishes[handle].num_cached_tokens == NUM_CACHED
    assert restarted.scheduler.blocks.stored.num_read_blocks == NUM_CACHED // 4


def test_aborted_request_leaves_nothing_held(restarted: Driver) -> None:
    restarted.files.faults = {"late"}
    restarted.add(1, PROMPT, max_tokens=4)
    restarted.step()
    restarted.abort(1)
    restarted.files.faults = set()
    restarted.run()
    assert not restarted.scheduler.blocks.stored.held_on_host


def test_failure_of_the_ranks_drops_orders(restarted: Driver) -> None:
    restarted.files.faults = {"late"}
    restarted.add(1, PROMPT, max_tokens=4)
    restarted.step()
    restarted.lose_ranks()
    assert not restarted.scheduler.blocks.stored.held_on_host
    restarted.files.faults = set()
    restarted.run()
    assert restarted.outputs[1] == oracle(PROMPT, 4)


def test_planted_use_of_a_read_before_its_end_is_found(
    restarted: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_read = StoredTier.begin_read

    def list_at_once(
        tier: StoredTier,
        sequence: Sequence,
        contents: Items[tuple[int, CacheKey]],
        num_tokens: int,
        compute_s: float,
        now: float,
    ) -> None:
        begin_read(tier, sequence, contents, num_tokens, compute_s, now)
        for order in tier._orders.values():
            for (group, key), block in zip(order.contents, order.order.host_blocks.tolist(), strict=True):
                tier._host.fill(group, key, block)
        tier._tickets.clear()

    monkeypatch.setattr(StoredTier, "begin_read", list_at_once)
    with pytest.raises((AssertionError, IndexError)):  # foreign KV, or none
        run(restarted, 1)


def test_slow_reads_are_not_begun(restarted: Driver) -> None:
    stored = restarted.scheduler.blocks.stored
    stored.read_blocks_per_s, stored._read_at = 1.0, restarted.now
    assert not stored.may_read([0], 32, tokens_per_s=1000.0, now=restarted.now)
    assert stored.may_read([0], 32, tokens_per_s=1.0, now=restarted.now)
    assert stored.may_read([0], 32, tokens_per_s=1000.0, now=restarted.now + 100)  # it may be faster now


def test_block_needs_all_ranks() -> None:
    config = small_config(num_host_blocks=8, kv_disk="/nowhere:64MiB", kv_shared="/there:64MiB")
    driver = Driver(config)
    tier = driver.scheduler.blocks.stored
    tier._num_ranks, tier._all_ranks = 2, 0b101
    key = block_key(0, bytes(32))
    tier.on_reports([StoredReport(0, tier=0, added=key)])
    assert not tier.has(0, bytes(32))
    tier.on_reports([StoredReport(1, tier=1, added=key)])
    assert tier.has(0, bytes(32))
    assert tier.num_blocks_in == (0, 0)
    tier.on_reports([StoredReport(1, tier=0, added=key)])
    assert tier.num_blocks_in == (1, 0)
    tier.on_reports([StoredReport(1, tier=1, removed=key), StoredReport(0, tier=0, removed=key)])
    assert not tier.has(0, bytes(32))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"enable_dp_attention": True}, "enable_dp_attention"),
        ({"prefix_caching": False}, "needs prefix_caching"),
    ],
)
def test_what_cannot_be_stored_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        small_config(num_host_blocks=8, kv_disk="/nowhere:64MiB", **settings)


def test_events_name_the_tier() -> None:
    driver = make_driver(kv_events="zmq://127.0.0.1:*")
    run(driver, 0)
    driver.now += 1.0
    driver.run()
    events = driver.scheduler.blocks.events.take()
    stored = {event.medium for event in events if isinstance(event, BlocksStored)}
    assert stored == {"GPU", "CPU", "DISK"}


def test_pool_keeps_half_of_the_host_blocks(restarted: Driver) -> None:
    stored = restarted.scheduler.blocks.stored
    assert stored.num_readable_blocks == 20
    assert not stored.may_read([0] * 21, 84, 0.0, restarted.now)
    assert np.array(stored.held_on_host).size == 0


def restart_with_states(**settings: Any) -> Driver:
    """Return a replica of a model that keeps states, after a restart of one that has run PROMPT."""
    driver = make_driver(num_state_slots=9, **settings)
    assert run(driver, 0) == 0
    store_and_restart(driver)
    return driver


def test_snapshot_is_found_after_a_restart() -> None:
    driver = restart_with_states()
    assert any(map(is_state, driver.files.blocks))
    assert run(driver, 1) == NUM_CACHED
    stored = driver.scheduler.blocks.stored
    assert stored.num_hit_tokens == NUM_CACHED
    assert stored.num_blocks_in[0] == sum(not is_state(key) for key in driver.files.blocks)
    assert not stored.held_on_host
    assert not stored.held_states
    assert run(driver, 2) == NUM_CACHED  # from memory


def test_longest_prefix_with_a_snapshot_is_read() -> None:
    driver = make_driver(num_state_slots=9)
    run(driver, 0, PROMPT[:17])
    run(driver, 1)
    store_and_restart(driver)
    assert run(driver, 2, PROMPT[:30] + random_prompt(9, seed=1)) == 16
    assert driver.scheduler.blocks.stored.num_read_blocks == 16 // 4 + 1
    assert run(driver, 3) == NUM_CACHED


def test_blocks_without_a_snapshot_are_not_read() -> None:
    driver = restart_with_states()
    for key in [key for key in driver.files.blocks if is_state(key)]:
        del driver.files.blocks[key]
    driver.replace()
    driver.run()
    assert run(driver, 1) == 0
    assert driver.scheduler.blocks.stored.num_read_blocks == 0


@pytest.mark.parametrize("fault", ["fail", "torn"])
def test_failed_read_of_a_snapshot_is_computed(fault: str) -> None:
    driver = restart_with_states()
    driver.files.faults = {fault}
    assert run(driver, 1) == 0
    assert driver.scheduler.blocks.stored.num_failed_reads == NUM_CACHED // 4 + 1


def test_one_slot_in_host_memory_passes_all_snapshots() -> None:
    driver = make_driver(num_state_slots=9, num_host_state_slots=1)
    prompts = [random_prompt(20, seed) for seed in range(3)]
    for handle, prompt in enumerate(prompts):
        run(driver, handle, prompt)
    for _ in prompts:
        driver.now += 1.0
        driver.run()
    store_and_restart(driver)
    for handle, prompt in enumerate(prompts, 3):
        assert run(driver, handle, prompt) == 16


def test_planted_snapshot_of_another_prefix_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = restart_with_states()
    fill = StateSlots.fill

    def fill_before_the_read(slots: StateSlots, digest: bytes, host_slot: int, num_saved_tokens: int) -> None:
        driver.group.host_states[host_slot] = b"another"
        fill(slots, digest, host_slot, num_saved_tokens)

    monkeypatch.setattr(StateSlots, "fill", fill_before_the_read)
    with pytest.raises(AssertionError):
        run(driver, 1)
