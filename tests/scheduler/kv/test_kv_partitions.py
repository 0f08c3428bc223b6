"""Partitions of the KV pool: the scheduler's side of data-parallel attention."""

from __future__ import annotations

from collections import Counter
from typing import Any

from driver import Driver
from fakes import oracle, random_prompt, small_config

BLOCK_SIZE = 4


def make_driver(num_blocks: int, num_kv_partitions: int = 2, **settings: Any) -> Driver:
    """Return a driver; `num_blocks` are of each partition, without its scratch block."""
    return Driver(
        small_config(
            num_blocks=num_blocks + 1,
            block_size=BLOCK_SIZE,
            num_kv_partitions=num_kv_partitions,
            eos=(),
            **settings,
        )
    )


def partition_of(driver: Driver, handle: int) -> int:
    (row,) = (row for row, each in driver.scheduler._state.running.items() if each.handle == handle)
    return driver.scheduler.blocks.rows.partition_of(row)


def add(driver: Driver, handle: int, prompt: list[int], max_tokens: int = 4) -> None:
    assert driver.add(handle, prompt, max_tokens=max_tokens) is None
    driver.step()


def finish(driver: Driver, prompts: dict[int, list[int]], max_tokens: int = 4) -> None:
    driver.run(depth=2)
    for handle, prompt in prompts.items():
        assert driver.outputs[handle] == oracle(prompt, max_tokens, stops=())
    assert driver.scheduler.blocks.num_held_blocks == 0


def test_pool_has_the_blocks_of_all_partitions() -> None:
    driver = make_driver(num_blocks=10, num_kv_partitions=4)
    assert driver.scheduler.blocks.num_blocks == 40
    assert driver.config.max_servable_tokens == 10 * BLOCK_SIZE


def test_use_is_reported_of_the_fullest_partition() -> None:
    driver = make_driver(num_blocks=20)
    prompts = {handle: random_prompt(length, handle) for handle, length in enumerate((15, 7))}
    for handle, prompt in prompts.items():
        add(driver, handle, prompt, 20)
    blocks = driver.scheduler.blocks
    assert (blocks.num_held_blocks, blocks.pool.max_partition_use) == (4 + 2, 4 / 20)
    finish(driver, prompts, 20)
    assert blocks.pool.max_partition_use == 0.0


def test_sequence_starts_in_the_least_used_partition() -> None:
    driver = make_driver(num_blocks=20, num_kv_partitions=3)
    prompts = {handle: random_prompt(length, handle) for handle, length in enumerate((16, 8, 12, 4))}
    for handle, prompt in prompts.items():
        add(driver, handle, prompt, 20)
    assert [partition_of(driver, handle) for handle in prompts] == [0, 1, 2, 1]
    finish(driver, prompts, 20)


def test_sequence_follows_its_prefix_until_the_partition_is_fuller_by_as_much() -> None:
    driver = make_driver(num_blocks=40, max_model_len=120, max_num_batched_tokens=64)
    shared = random_prompt(32, 1)
    prompts = {0: shared, 1: [*shared, 5, 6], 2: random_prompt(12, 2), 3: random_prompt(40, 3)}
    add(driver, 0, prompts[0], 20)
    add(driver, 1, prompts[1], 20)
    add(driver, 2, prompts[2], 20)
    assert [partition_of(driver, handle) for handle in range(3)] == [0, 0, 1]
    assert driver.scheduler.blocks.num_hit_tokens == 32
    finish(driver, dict(list(prompts.items())[:3]), 20)
    add(driver, 3, prompts[3], 60)  # both are empty: the first one
    assert partition_of(driver, 3) == 0
    prompts[4] = [*shared, 7]  # whose prefix of 8 blocks is where 10 blocks are used
    add(driver, 4, prompts[4], 20)
    assert partition_of(driver, 4) == 1


def test_preemption_makes_room_in_the_same_partition_only() -> None:
    driver = make_driver(num_blocks=8, max_model_len=32, prefix_caching=False)
    lengths = {0: (12, 16), 1: (16, 4), 2: (4, 16), 3: (4, 8)}  # of the prompt, and of the output
    prompts = {handle: random_prompt(num_prompt, handle) for handle, (num_prompt, _) in lengths.items()}
    for handle, prompt in prompts.items():
        add(driver, handle, prompt, lengths[handle][1])
    assert [partition_of(driver, handle) for handle in prompts] == [0, 1, 0, 1]
    driver.run(depth=2)
    for handle, prompt in prompts.items():
        assert driver.outputs[handle] == oracle(prompt, lengths[handle][1], stops=())
    starts = Counter(new.seq_id for plan in driver.plans for new in plan.new)
    # The newest sequence would go first, but it is in the other partition.
    assert {seq_id for seq_id, count in starts.items() if count > 1} == {3}


def test_swapped_sequence_resumes_in_its_partition() -> None:
    driver = make_driver(
        num_blocks=8, max_model_len=32, prefix_caching=False, num_host_blocks=20, swap_blocks_per_s=1e9
    )  # fmt: skip
    prompts = {handle: random_prompt(8, handle) for handle in range(4)}
    for handle, prompt in prompts.items():
        driver.add(handle, prompt, max_tokens=20)
    finish(driver, prompts, 20)
    assert driver.scheduler.stats.num_preemptions > 0
    # The fake ranks check that no block moves between partitions.
    assert driver.scheduler.blocks.num_swapped_blocks > 0


def test_longest_sequence_starts_beside_sequences_of_other_partitions() -> None:
    """Growth of others is no reason to wait: they are in other partitions."""
    driver = make_driver(num_blocks=200, max_model_len=800, max_num_batched_tokens=1000)
    short, longest = random_prompt(8, 1), random_prompt(798, 2)
    add(driver, 0, short, 40)
    add(driver, 1, longest, 2)
    assert [partition_of(driver, handle) for handle in (0, 1)] == [0, 1]
    finish(driver, {0: short}, 40)
    assert driver.outputs[1] == oracle(longest, 2, stops=())


def test_lost_content_is_found_in_no_partition() -> None:
    driver = make_driver(num_blocks=20)
    prompt = random_prompt(16, 1)
    add(driver, 0, prompt)
    driver.run()
    driver.lose_ranks()
    assert driver.scheduler.blocks.num_cached_blocks == 0
    add(driver, 1, prompt)
    assert driver.scheduler.blocks.num_hit_tokens == 0
    finish(driver, {0: prompt, 1: prompt})
