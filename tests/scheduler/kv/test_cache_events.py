"""A reader of the events knows, at each moment, the blocks of each memory, with their tokens and parents."""

from typing import Any

import numpy as np
import pytest
from driver import Driver
from fakes import IMAGE_TOKEN, VOCAB_SIZE, images_of, random_prompt, small_config, submit

from quire.proto.digests import child_digest, make_root
from quire.proto.lora import LoraReference
from quire.proto.media import MediaItem
from quire.scheduler.kv.cache_events import DEVICE_MEDIUM, HOST_MEDIUM, BlocksStored, CacheEvent, CacheEvents
from quire.scheduler.kv.kv_tiers import KvTiers


class Reader:
    """A router's copy of a replica's caches."""

    def __init__(self, driver: Driver) -> None:
        self.blocks, self.cached = (
            driver.scheduler.blocks,
            {DEVICE_MEDIUM: set[bytes](), HOST_MEDIUM: set[bytes]()},
        )
        self.roots: set[bytes | None] = set()

    def read(self) -> list[CacheEvent]:
        events = self.blocks.events.take()
        for event in events:
            known = self.cached[event.medium]
            if isinstance(event, BlocksStored):
                assert not known & set(event.digests)
                if event.medium == HOST_MEDIUM:
                    of_device = self.cached[DEVICE_MEDIUM]
                    assert of_device >= set(event.digests), "a router has forgotten the tokens of a block"
                known.update(event.digests)
                self.check_chain(event)
            else:
                assert known >= set(event.digests)
                known.difference_update(event.digests)
        of_device = {digest for cache in self.blocks.prefixes.caches for digest in cache.full_digests()}
        of_host = set(self.blocks.host.full_digests()) if self.blocks.host else set()
        assert self.cached == {DEVICE_MEDIUM: of_device, HOST_MEDIUM: of_host}
        return events

    def check_chain(self, event: BlocksStored) -> None:
        """The digests follow from the tokens, as a router computes names of its own from them."""
        if event.medium == HOST_MEDIUM:
            assert not event.tokens
            return
        self.roots.add(event.root)
        parent = event.parent or event.root or make_root("fake")
        width = 4 * self.blocks.block_size
        for index, digest in enumerate(event.digests):
            parent = child_digest(parent, bytes(event.tokens[index * width : (index + 1) * width]))
            assert parent == digest


def make_driver(**settings: Any) -> Driver:
    return Driver(small_config(kv_events="zmq://127.0.0.1:*", **settings))


@pytest.mark.parametrize("num_host_blocks", [0, 10])
def test_events_reproduce_the_cached_sets(num_host_blocks: int) -> None:
    driver = make_driver(num_blocks=12, num_host_blocks=num_host_blocks)
    reader, rng = Reader(driver), np.random.default_rng(0)
    prompts = [rng.integers(2, VOCAB_SIZE, 13).tolist() for _ in range(6)]
    for handle, prompt in enumerate([*prompts, *prompts[::-1]]):
        driver.add(handle, prompt, max_tokens=6, ignore_eos=True, salt=b"salt" if handle % 3 == 0 else b"")
        driver.run()
        reader.read()
    assert reader.roots == {None, make_root("fake", b"salt")}
    driver.scheduler.blocks.flush_cache()
    reader.read()
    assert not any(reader.cached.values())


def test_blocks_of_one_prompt_are_one_event() -> None:
    driver = make_driver()
    prompt = random_prompt(13)
    driver.add(0, prompt, max_tokens=1, ignore_eos=True)
    driver.run()
    (event,) = Reader(driver).read()
    assert isinstance(event, BlocksStored)
    assert np.frombuffer(event.tokens, np.int32).tolist() == prompt[:12]
    assert (event.parent, event.root, event.lora_name) == (None, None, None)


def test_event_names_the_adapter() -> None:
    driver = make_driver(enable_lora=True)
    adapter = LoraReference("poet", "/adapters/poet")
    driver.add(0, random_prompt(9), max_tokens=1, ignore_eos=True, lora=adapter)
    driver.run()
    (event,) = Reader(driver).read()
    assert isinstance(event, BlocksStored)
    assert (event.lora_name, event.root) == ("poet", make_root("fake", adapter=adapter.cache_key))


def test_blocks_of_a_failed_step_are_removed() -> None:
    driver = make_driver()
    reader = Reader(driver)
    driver.add(0, random_prompt(13), max_tokens=20, ignore_eos=True)
    driver.step()
    reader.read()
    driver.lose_ranks(kept=KvTiers.NONE)
    reader.read()
    driver.run()
    reader.read()


def test_nothing_is_recorded_if_nobody_reads() -> None:
    driver = Driver(small_config())
    driver.add(0, random_prompt(13), max_tokens=1)
    driver.run()
    assert driver.scheduler.blocks.events.take() == []


def test_blocks_name_the_images_that_they_touch() -> None:
    digest = b"i" * 16
    config = small_config(kv_events="zmq://127.0.0.1:*", encoder_cache_rows=30, eos=())
    driver = Driver(config, images=images_of([digest]))
    size = driver.scheduler.blocks.block_size
    item = MediaItem(digest, size + 1, size, size, num_bytes=16)  # in the second and the third block of four
    prompt = [5] * item.start + [IMAGE_TOKEN] * size + [6] * (2 * size)
    assert driver.add(0, prompt, b"gateway", media=(item,), max_tokens=1) is None
    driver.run()
    (event,) = (each for each in driver.scheduler.blocks.events.take() if isinstance(each, BlocksStored))
    assert event.media == [(), (digest,), (digest,), ()]


def test_full_last_block_of_a_sequence_with_a_state_is_stored_before_it_is_removed() -> None:
    driver = make_driver(num_state_slots=4)
    reader, size = Reader(driver), driver.scheduler.blocks.block_size
    for num_tokens in range(size, 3 * size):  # of which some end with a full block
        driver.add(num_tokens, random_prompt(size, num_tokens), max_tokens=num_tokens, ignore_eos=True)
        driver.run()
        reader.read()
    driver.scheduler.blocks.flush_cache()
    reader.read()
    assert not any(reader.cached.values())


def test_blocks_of_two_partitions_are_no_one_event() -> None:
    events = CacheEvents()
    sequence = Driver(small_config()).scheduler._make_sequences(b"g", submit(1, random_prompt(9)), 0.0)[0]
    first = child_digest(sequence.root, b"0123")
    events.add_stored((first, sequence.root, b"0123"), sequence, 0, partition=0)
    events.add_stored((child_digest(first, b"4567"), first, b"4567"), sequence, 1, partition=1)
    assert [(event.partition, len(event.digests)) for event in events.take()] == [(0, 1), (1, 1)]
