"""Host memory as a second tier: preemption by swap, and prefix hits on evicted blocks."""

from driver import Driver
from fakes import oracle, random_prompt, small_config
from narrowing import not_none

FAST = 1e12  # blocks/s: swapping is always cheaper than computing again


def swapped(driver: Driver) -> tuple[int, int]:
    return sum(len(p.swap_out) for p in driver.plans), sum(len(p.swap_in) for p in driver.plans)


def test_sequence_preempted_by_swap_resumes_without_recomputation() -> None:
    driver = Driver(
        small_config(num_blocks=12, prefix_caching=False, num_host_blocks=32, swap_blocks_per_s=FAST)
    )
    for handle in range(3):
        driver.add(handle, random_prompt(9, handle), max_tokens=20, ignore_eos=True)
    driver.run(depth=2)
    for handle in range(3):
        assert driver.outputs[handle] == oracle(random_prompt(9, handle), 20, stops=())
        assert driver.finishes[handle].timings.recomputed_tokens == 0
    assert driver.scheduler.stats.num_preemptions > 0
    out, back = swapped(driver)
    assert out == back > 0
    assert not_none(driver.scheduler.blocks.host).num_held == 0


def test_preempted_sequence_is_recomputed_if_host_memory_is_full() -> None:
    driver = Driver(
        small_config(num_blocks=12, prefix_caching=False, num_host_blocks=1, swap_blocks_per_s=FAST)
    )
    for handle in range(3):
        driver.add(handle, random_prompt(9, handle), max_tokens=20, ignore_eos=True)
    driver.run()
    assert swapped(driver) == (0, 0)
    assert sum(finish.timings.recomputed_tokens for finish in driver.finishes.values()) > 0


def test_preemption_recomputes_if_swapping_is_slower() -> None:
    driver = Driver(
        small_config(num_blocks=12, prefix_caching=False, num_host_blocks=32, swap_blocks_per_s=1.0)
    )
    driver.scheduler._state.costs.prefill_tokens_per_s = 1000.0
    for handle in range(3):
        driver.add(handle, random_prompt(9, handle), max_tokens=20, ignore_eos=True)
    driver.run()
    assert swapped(driver) == (0, 0)


def test_abort_of_swapped_sequences_frees_host_memory() -> None:
    driver = Driver(
        small_config(num_blocks=12, prefix_caching=False, num_host_blocks=32, swap_blocks_per_s=FAST)
    )
    for handle in range(3):
        driver.add(handle, random_prompt(9, handle), max_tokens=20, ignore_eos=True)
    while not not_none(driver.scheduler.blocks.host).num_held:
        driver.step()
    for handle in range(3):
        driver.abort(handle)
    assert not_none(driver.scheduler.blocks.host).num_held == 0
    driver.run()


def test_evicted_prefix_is_loaded_from_host_memory() -> None:
    driver = Driver(small_config(num_blocks=12, num_host_blocks=64, swap_blocks_per_s=FAST))
    driver.add(0, random_prompt(20), max_tokens=1)
    driver.run()
    for handle in range(1, 6):
        driver.add(handle, random_prompt(30, handle), max_tokens=1)
        driver.run()
    driver.add(9, [*random_prompt(20), 7], max_tokens=3, ignore_eos=True)
    driver.run()
    assert driver.finishes[9].num_cached_tokens == 20
    assert driver.outputs[9] == oracle([*random_prompt(20), 7], 3, stops=())
    assert swapped(driver)[1] == 5
