"""State slots and snapshots: where they are taken, found and dropped, and what a failure leaves of them."""

from __future__ import annotations

import pytest
from driver import Driver
from fakes import oracle, random_prompt, small_config

from quire.proto.block_tables import BlockTables
from quire.scheduler.kv.kv_tiers import KvTiers
from quire.scheduler.kv.snapshot_policy import SharedPrompts, snapshot_ends, snapshot_value
from quire.scheduler.kv.state_slots import StateSlots


def make_driver(num_state_slots: int = 9, **settings: object) -> Driver:
    defaults = {"num_blocks": 100, "max_model_len": 80, "max_num_batched_tokens": 80}
    return Driver(small_config(num_state_slots=num_state_slots, **(defaults | settings)))  # type: ignore[arg-type]


def num_hit(driver: Driver) -> int:
    return driver.scheduler.blocks.num_hit_tokens


def run(driver: Driver, handle: int, prompt: list[int], num_tokens: int = 6, depth: int = 2) -> list[int]:
    driver.add(handle, prompt, max_tokens=num_tokens, ignore_eos=True)
    driver.run(depth)
    assert driver.outputs[handle] == oracle(prompt, num_tokens, stops=())
    return prompt + driver.outputs[handle]


class TestPolicy:
    def test_prompt_is_saved_at_its_last_whole_block(self) -> None:
        assert snapshot_ends(0, 0, 33, 4, is_reused=True) == (32,)
        # The last token is computed again, by the same prompt too.
        assert snapshot_ends(0, 0, 32, 4, is_reused=True) == (28,)

    def test_branch_is_saved_where_blocks_without_a_snapshot_end(self) -> None:
        assert snapshot_ends(0, 5, 41, 4, is_reused=True) == (20, 40)
        assert snapshot_ends(16, 5, 41, 4, is_reused=True) == (40,)  # one block is not worth a snapshot
        assert snapshot_ends(0, 9, 41, 4, is_reused=True) == (36,)

    def test_pooled_prompt_is_saved_at_branches_only(self) -> None:
        assert snapshot_ends(0, 5, 41, 4, is_reused=False) == (20,)

    def test_short_prompt_is_not_saved(self) -> None:
        assert snapshot_ends(0, 0, 8, 4, is_reused=True) == ()

    def test_value_grows_with_tokens_hits_and_time(self) -> None:
        values = [snapshot_value(*case) for case in ((10, 0, 0), (20, 0, 0), (10, 2, 0), (10, 2, 5))]
        assert values == sorted(values)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_tokens", [5, 6, 7, 8])
def test_next_turn_starts_where_the_output_ended(depth: int, num_tokens: int) -> None:
    driver = make_driver()
    first = run(driver, 0, random_prompt(21), num_tokens, depth)
    run(driver, 1, first + random_prompt(9, seed=1))
    assert num_hit(driver) == len(first) - 1  # the last token was sampled and not computed


def test_end_of_sequence_token_in_flight_is_part_of_the_state() -> None:
    """The step that computes it was planned before it was known."""
    prompts = (random_prompt(21, seed) for seed in range(400))
    prompt = next(each for each in prompts if 3 <= len(oracle(each, 20)) < 12)
    driver = make_driver()
    driver.add(0, prompt, max_tokens=20)
    driver.run(depth=2)
    first = prompt + driver.outputs[0]
    run(driver, 1, first + random_prompt(9, seed=1))
    assert num_hit(driver) == len(first)


def test_same_prompt_starts_at_its_last_whole_block() -> None:
    driver = make_driver()
    prompt = random_prompt(30)
    run(driver, 0, prompt)
    run(driver, 1, prompt)
    assert num_hit(driver) == 28


def test_third_prompt_starts_where_the_second_branched_off() -> None:
    driver = make_driver()
    prefix = random_prompt(40)
    hits = [0]
    for handle in range(3):
        run(driver, handle, prefix[:25] + random_prompt(20, seed=handle + 1))
        hits.append(num_hit(driver))
    assert hits == [0, 0, 0, 24]


def test_chunk_that_ends_elsewhere_saves_a_snapshot_on_its_way() -> None:
    driver = make_driver(max_num_batched_tokens=13)
    run(driver, 0, random_prompt(30))
    chunks = [plan for plan in driver.plans if plan.chunk_lens.size]
    assert [plan.chunk_lens.tolist() for plan in chunks] == [[13], [13], [4]]
    assert [plan.save_tails.tolist() for plan in chunks] == [[], [], [2]]
    assert sum(len(plan.state_saves) for plan in driver.plans) == 1


def test_chunk_with_two_snapshots_ends_at_the_second() -> None:
    driver = make_driver()
    prefix = random_prompt(40)
    for handle in range(2):
        run(driver, handle, prefix[:25] + random_prompt(20, seed=handle + 1))
    chunks = [plan for plan in driver.plans if plan.chunk_lens.size]
    assert [plan.chunk_lens.tolist() for plan in chunks] == [[45], [44], [1]]
    assert [plan.save_tails.tolist() for plan in chunks] == [[1], [20, 0], []]


def test_nothing_is_saved_without_prefix_caching() -> None:
    driver = make_driver(prefix_caching=False)
    run(driver, 0, random_prompt(30))
    assert driver.scheduler.blocks.state_slots.num_snapshots == 0
    assert not any(plan.state_saves.size for plan in driver.plans)


def test_sequences_wait_for_a_slot() -> None:
    driver = make_driver(num_state_slots=3)
    for handle in range(5):
        driver.add(handle, random_prompt(9, seed=handle), max_tokens=8, ignore_eos=True)
    driver.step(2)
    assert driver.scheduler.num_running == 2
    driver.run(depth=2)
    for handle in range(5):
        assert driver.outputs[handle] == oracle(random_prompt(9, seed=handle), 8, stops=())


def test_prompts_that_earlier_ones_began_leave_slots_to_snapshots() -> None:
    prompts = SharedPrompts()
    assert prompts.num_reserved(16) == 0
    for _ in range(100):
        prompts.count(40, 40)
    assert prompts.num_reserved(16) == 4
    for _ in range(100):
        prompts.count(40, 0)
    assert prompts.num_reserved(16) == 0


@pytest.mark.parametrize("shares", [True, False])
def test_rows_of_shared_prompts_do_not_take_all_slots(shares: bool) -> None:
    driver = make_driver(num_blocks=400, max_num_seqs=8, max_num_batched_tokens=400)
    same = random_prompt(40)
    for handle in range(20):
        run(driver, handle, same if shares else random_prompt(40, seed=handle), 2)
    for handle in range(20, 30):
        prompt = same if shares else random_prompt(40, seed=handle)
        driver.add(handle, prompt, max_tokens=8, ignore_eos=True)
    driver.step(2)
    assert driver.scheduler.num_running == (7 if shares else 8)
    driver.run(depth=2)
    driver.scheduler.check_integrity()


def test_last_slot_becomes_that_of_the_sequence_that_hits_it() -> None:
    driver = make_driver(num_state_slots=2)
    first = run(driver, 0, random_prompt(21))
    run(driver, 1, first + random_prompt(5, seed=1))
    assert num_hit(driver) == len(first) - 1
    assert not any(plan.state_copies.size for plan in driver.plans)


def test_snapshot_of_least_value_is_dropped_first() -> None:
    driver = make_driver(num_state_slots=4)
    prompts = [random_prompt(length, seed=length) for length in (61, 13, 57)]
    turns = [run(driver, handle, prompt) for handle, prompt in enumerate(prompts)]
    run(driver, 10, turns[0] + random_prompt(3, seed=1))
    assert num_hit(driver) == 60  # that of the longest prompt, though it is the oldest
    run(driver, 11, turns[1] + random_prompt(3, seed=1))
    assert num_hit(driver) == 60


def test_snapshots_that_a_failed_step_was_to_save_are_forgotten() -> None:
    driver = make_driver(max_num_batched_tokens=28)
    prompt = random_prompt(30)
    driver.add(0, prompt, max_tokens=6, ignore_eos=True)
    assert driver.plan() is not None  # it saves a state
    driver.lose_ranks(kept=KvTiers.ALL)
    driver.run(depth=2)
    assert driver.outputs[0] == oracle(prompt, 6, stops=())
    assert num_hit(driver) == 0


def test_confirmed_snapshot_survives_a_failed_step_that_changed_its_row() -> None:
    driver = make_driver()
    prompt = random_prompt(30)
    driver.add(0, prompt, max_tokens=20, ignore_eos=True)
    for _ in range(5):
        driver.step(2)
    driver.lose_ranks(kept=KvTiers.ALL)
    driver.run(depth=2)
    assert driver.outputs[0] == oracle(prompt, 20, stops=())
    assert num_hit(driver) == 28


def test_preempted_sequences_start_from_snapshots() -> None:
    driver = make_driver(num_blocks=22, max_num_seqs=4)
    prompts = [random_prompt(25, seed=seed) for seed in range(3)]
    for handle, prompt in enumerate(prompts):
        driver.add(handle, prompt, max_tokens=24, ignore_eos=True)
    driver.run(depth=2)
    assert driver.scheduler.stats.num_preemptions > 0
    assert num_hit(driver) > 0
    for handle, prompt in enumerate(prompts):
        assert driver.outputs[handle] == oracle(prompt, 24, stops=())


def test_plan_with_another_state_slot_has_another_digest() -> None:
    tables = [BlockTables(4, 8) for _ in range(3)]
    for each, slot in zip(tables, (1, 1, 2), strict=True):
        each.put_state(3, slot)
    assert tables[0].digest == tables[1].digest != tables[2].digest
    for each in tables:
        each.release(each.tables_of(each.state_slots.nonzero()[0]))
        assert each.digest == 0
        assert not each.state_slots.any()


def test_check_finds_a_slot_that_two_rows_have() -> None:
    tables = BlockTables(4, 8)
    slots = StateSlots(tables, 5, 0, lambda digest: False)
    slots.open(0, None)
    slots.check_integrity([0], [], [], [])
    tables.put_state(1, slots.slot_of(0))
    with pytest.raises(AssertionError):
        slots.check_integrity([0, 1], [], [], [])


def test_snapshot_of_a_full_pool_goes_to_host_memory_and_comes_back() -> None:
    driver = make_driver(num_state_slots=3, num_host_state_slots=2)
    prompts = [[5 + handle, *random_prompt(16)] for handle in range(4)]
    for handle, prompt in enumerate(prompts):
        driver.add(handle, prompt, max_tokens=1)
        driver.run()
    slots = driver.scheduler.blocks.state_slots
    assert slots.num_host_snapshots == 2
    assert sum(len(plan.state_swap_out) for plan in driver.plans) >= 2
    assert not any(len(plan.state_swap_in) for plan in driver.plans)
    driver.add(9, [*prompts[2], 5, 6], max_tokens=2)
    driver.run()
    assert sum(len(plan.state_swap_in) for plan in driver.plans) == 1
    assert driver.scheduler.blocks.num_hit_tokens == 17
    driver.scheduler.blocks.keep_tiers(KvTiers.NONE)
    assert slots.num_host_snapshots == slots.num_snapshots == 0
    driver.scheduler.check_integrity()


class TestPreemptedStates:
    """States of preempted sequences in host memory."""

    def make_driver(self, **settings: object) -> Driver:
        scarce = {
            "num_blocks": 24,
            "num_host_blocks": 60,
            "num_host_state_slots": 4,
            "swap_blocks_per_s": 1e12,
            "max_num_batched_tokens": 16,
        }
        return make_driver(**(scarce | settings))  # type: ignore[arg-type]

    def add_all(self, driver: Driver) -> list[list[int]]:
        prompts = [random_prompt(14 + 3 * seed, seed=seed) for seed in range(5)]
        for handle, prompt in enumerate(prompts):
            driver.add(handle, prompt, max_tokens=20, ignore_eos=True)
        return prompts

    def finish(self, driver: Driver, prompts: list[list[int]], depth: int = 2) -> None:
        driver.run(depth)
        for handle, prompt in enumerate(prompts):
            assert driver.outputs[handle] == oracle(prompt, 20, stops=())
        assert driver.scheduler._state.blocks.state_slots._host.num_held == 0

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_preempted_sequences_go_on_without_computing_again(self, depth: int) -> None:
        driver = self.make_driver(prefix_caching=False)
        prompts = self.add_all(driver)
        self.finish(driver, prompts, depth)
        num_preempted = driver.scheduler.stats.num_preemptions
        assert num_preempted > 0
        assert sum(len(plan.state_swap_out) for plan in driver.plans) == num_preempted
        assert sum(len(plan.state_swap_in) for plan in driver.plans) == num_preempted
        # Prompts, and a step for each token: nothing was computed twice.
        num_computed = sum(int(plan.chunk_lens.sum()) for plan in driver.plans)
        assert num_computed == sum(map(len, prompts)) + num_preempted

    def test_others_compute_while_a_victim_waits_for_its_tokens(self) -> None:
        driver = self.make_driver(prefix_caching=False)
        prompts = self.add_all(driver)
        while not driver.scheduler._state.leaving:
            driver.step(2)
        (victim,) = driver.scheduler._state.leaving
        plan = driver.plans[-1]
        assert victim in plan.held_rows
        assert driver.scheduler.num_running - 1 > len(plan.held_rows) - 1 >= 0
        self.finish(driver, prompts)

    def test_without_room_in_host_memory_states_are_computed_again(self) -> None:
        driver = self.make_driver(num_host_state_slots=0)
        prompts = self.add_all(driver)
        driver.run(depth=2)
        assert driver.scheduler.stats.num_preemptions > 0
        assert not any(plan.state_swap_out.size for plan in driver.plans)
        for handle, prompt in enumerate(prompts):
            assert driver.outputs[handle] == oracle(prompt, 20, stops=())

    def test_aborted_sequence_frees_its_state(self) -> None:
        driver = self.make_driver()
        self.add_all(driver)
        slots = driver.scheduler._state.blocks.state_slots
        while not any(own.host_state for own in driver.scheduler._state.alive.values()):
            driver.step(2)
        for handle in range(5):
            driver.abort(handle)
        driver.run()
        assert slots._host.num_held == 0

    @pytest.mark.parametrize("kept", [KvTiers.NONE, KvTiers.HOST, KvTiers.ALL])
    def test_states_survive_a_failure_as_host_blocks_do(self, kept: KvTiers) -> None:
        driver = self.make_driver()
        prompts = self.add_all(driver)
        while not any(own.host_state for own in driver.scheduler._state.alive.values()):
            driver.step(2)
        driver.step(2)
        driver.plan()
        driver.lose_ranks(kept=kept)
        kept_states = [own.host_state for own in driver.scheduler._state.alive.values() if own.host_state]
        assert bool(kept_states) == (KvTiers.HOST in kept)
        self.finish(driver, prompts)
