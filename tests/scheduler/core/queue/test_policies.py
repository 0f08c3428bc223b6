"""Admission order, deadlines and the choice of victims."""

import weakref
from array import array
from dataclasses import replace

import pytest
from driver import Driver
from fakes import oracle, random_prompt, small_config
from narrowing import not_none

from quire.proto.config import LoraConfig
from quire.proto.lora import LoraReference
from quire.proto.sampling import SamplingParams
from quire.proto.step import StepResult
from quire.scheduler.core.queue.policy import CostModel, counter_on_arrival, service
from quire.scheduler.core.queue.waiting import WaitingQueue
from quire.scheduler.sequences.sequence import Sequence


def order_of_first_tokens(driver: Driver) -> list[int]:
    order: list[int] = []
    while driver.step():
        driver.now += 1.0
        order += [handle for handle, output in driver.outputs.items() if output and handle not in order]
    return order


def test_fcfs_admits_by_arrival() -> None:
    driver = Driver(small_config(max_num_seqs=1))
    for handle, priority in ((0, 0), (1, 5), (2, 9)):
        driver.add(handle, random_prompt(4, handle), max_tokens=2, priority=priority)
    assert order_of_first_tokens(driver)[1:] == [1, 2]


def test_higher_priority_is_admitted_first_and_preempts_lower() -> None:
    driver = Driver(small_config(max_num_seqs=1, policy="priority"))
    driver.add(0, random_prompt(4), max_tokens=9, priority=0, ignore_eos=True)
    driver.step()
    driver.add(1, random_prompt(4, 1), max_tokens=3, priority=1, ignore_eos=True)
    driver.add(2, random_prompt(4, 2), max_tokens=3, priority=2, ignore_eos=True)
    driver.step()
    driver.step()  # a row that got a block in a plan is not taken in the same plan
    assert driver.outputs[2]
    driver.run(depth=2)
    assert driver.finishes[0].timings.recomputed_tokens > 0
    for handle, most in ((0, 9), (1, 3), (2, 3)):
        assert driver.outputs[handle] == oracle(random_prompt(4, handle), most, stops=())


def test_victim_has_lowest_priority_then_least_computed_tokens() -> None:
    driver = Driver(
        small_config(num_blocks=14, policy="priority", prefix_caching=False, max_num_batched_tokens=64)
    )
    driver.add(0, random_prompt(12), max_tokens=20, priority=1, ignore_eos=True)
    driver.add(1, random_prompt(14, 1), max_tokens=20, priority=0, ignore_eos=True)
    driver.add(2, random_prompt(5, 2), max_tokens=20, priority=0, ignore_eos=True)
    while not driver.scheduler.stats.num_preemptions:
        driver.step()
    preempted = driver.scheduler._state.waiting.peek()
    assert preempted is not None
    assert preempted.handle == 2


def test_shortest_prefill_admits_shortest_prompt_first() -> None:
    driver = Driver(small_config(max_num_seqs=1, policy="shortest-prefill"))
    for handle, length in ((0, 4), (1, 12), (2, 3), (3, 7)):
        driver.add(handle, random_prompt(length, handle), max_tokens=2)
    assert order_of_first_tokens(driver) == [2, 0, 3, 1]


def test_longest_prefix_goes_first_with_bounded_wait_for_others() -> None:
    driver = Driver(small_config(max_num_seqs=1, num_blocks=64, policy="longest-prefix"))
    head = random_prompt(16)
    driver.add(0, head, max_tokens=1)
    driver.run()
    driver.add(1, random_prompt(16, 1), max_tokens=1)
    for handle in range(2, 90):
        driver.add(handle, [*head, handle % 60 + 2], max_tokens=1)
    order = order_of_first_tokens(driver)
    assert order[1] != 1
    assert 1 in order[:70]


def test_fair_policy_shares_by_weight() -> None:
    weights = (("gold", 3.0), ("tin", 1.0))
    driver = Driver(small_config(max_num_seqs=1, num_blocks=64, policy="fair", tenant_weights=weights))
    for handle in range(80):
        tenant = "gold" if handle % 2 else "tin"
        driver.add(handle, random_prompt(4, handle), max_tokens=4, tenant=tenant, ignore_eos=True)
    for _ in range(4 * 40):
        driver.step()
    gold = sum(1 for handle in driver.finishes if handle % 2)
    assert gold == pytest.approx(0.75 * len(driver.finishes), abs=2)


def test_fair_policy_isolates_a_tenant_from_a_flood() -> None:
    driver = Driver(small_config(max_num_seqs=1, num_blocks=64, policy="fair"))
    for handle in range(50):
        driver.add(handle, random_prompt(4, handle), max_tokens=2, tenant="loud")
    for _ in range(20):
        driver.step()
    driver.add(99, random_prompt(4, 99), max_tokens=2, tenant="quiet")
    done = len(driver.finishes)
    while 99 not in driver.finishes:
        driver.step()
    assert len(driver.finishes) - done <= 3


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_fair_policy_isolates_an_adapter_from_a_flood(policy: str) -> None:
    """Both adapters have a slot, so they take no turns."""
    config = small_config(max_num_seqs=1, num_blocks=64, policy=policy)
    driver = Driver(replace(config, lora=LoraConfig(max_loras=2, max_lora_rank=8, max_cpu_loras=2)))
    loud, quiet = (LoraReference(name, f"/adapters/{name}") for name in ("loud", "quiet"))
    for handle in range(50):
        driver.add(handle, random_prompt(4, handle), max_tokens=2, lora=loud)
    for _ in range(30):
        driver.step()
    driver.add(99, random_prompt(4, 99), max_tokens=2, lora=quiet)
    driver.add(98, random_prompt(4, 98), max_tokens=2)
    done = len(driver.finishes)
    assert done > 5
    while not {98, 99} <= driver.finishes.keys():
        driver.step()
    if policy == "fair":
        assert len(driver.finishes) - done <= 5
    else:
        assert len(driver.finishes) == 52


def test_fair_policy_shares_by_tenant_before_adapters() -> None:
    """A tenant with two adapters has no more than one without."""
    config = small_config(max_num_seqs=1, num_blocks=64, policy="fair")
    driver = Driver(replace(config, lora=LoraConfig(max_loras=2, max_lora_rank=8, max_cpu_loras=2)))
    adapters = [LoraReference(name, f"/adapters/{name}") for name in "ab"]
    for handle in range(90):
        lora = adapters[handle % 3] if handle % 3 < 2 else None
        tenant = "none" if lora is None else "two"
        driver.add(handle, random_prompt(4, handle), max_tokens=4, tenant=tenant, lora=lora, ignore_eos=True)
    for _ in range(4 * 40):
        driver.step()
    counts = [sum(handle % 3 == kind for handle in driver.finishes) for kind in range(3)]
    assert counts[2] == pytest.approx(sum(counts) / 2, abs=2)
    assert counts[0] == pytest.approx(counts[1], abs=2)


def test_virtual_counter_functions() -> None:
    assert service(10, 5, weight=2.0) == 10.0
    assert counter_on_arrival(1.0, [7.0, 9.0]) == 7.0
    assert counter_on_arrival(8.0, []) == 8.0


def test_deadline_ends_running_and_waiting_requests() -> None:
    driver = Driver(small_config(max_num_seqs=1))
    driver.add(0, random_prompt(4), max_tokens=50, ignore_eos=True, timeout_s=5.0)
    driver.add(1, random_prompt(4, 1), max_tokens=50, ignore_eos=True, timeout_s=2.0)
    driver.add(2, random_prompt(4, 2), max_tokens=2, ignore_eos=True)
    while driver.step():
        driver.now += 1.0
    for handle in (0, 1):
        assert driver.finishes[handle].grpc_status == "DEADLINE_EXCEEDED"
    assert 4 <= len(driver.outputs[0]) <= 6
    assert driver.outputs[1] == []
    assert driver.outputs[2] == oracle(random_prompt(4, 2), 2, stops=())
    assert driver.scheduler.blocks.num_held_blocks == 0


def test_request_that_comes_after_its_deadline_is_refused() -> None:
    driver = Driver(small_config())
    assert not_none(driver.add(1, random_prompt(4), timeout_s=0.0)).grpc_status == "DEADLINE_EXCEEDED"


def test_different_salts_share_no_prefix() -> None:
    driver = Driver(small_config())
    for handle, salt in ((0, b"a"), (1, b"b"), (2, b"a")):
        driver.add(handle, random_prompt(20), max_tokens=2, salt=salt)
        driver.run()
    assert [driver.finishes[handle].num_cached_tokens > 0 for handle in range(3)] == [False, False, True]


def test_tenants_share_no_prefix_outside_of_a_pool() -> None:
    driver = Driver(small_config())
    for handle, tenant in enumerate(("gold", "tin", "", "gold")):
        driver.add(handle, random_prompt(20), max_tokens=2, tenant=tenant)
        driver.run()
    assert [driver.finishes[handle].num_cached_tokens for handle in range(4)] == [0, 0, 0, 19]
    assert driver.scheduler.blocks.num_hit_tokens == 19


def test_pool_reports_only_the_tenants_own_tokens() -> None:
    """A prompt that another tenant of the pool sent is found, but only a repeat of one's own is reported."""
    driver = Driver(small_config())
    prompt, other = random_prompt(20), random_prompt(8) + random_prompt(12, seed=1)
    for handle, (tenant, sent) in enumerate(
        [("gold", prompt), ("tin", prompt), ("tin", prompt), ("gold", other), ("tin", other)]
    ):
        driver.add(handle, sent, max_tokens=2, tenant=tenant, prefix_pool="metals")
        driver.run()
    assert driver.scheduler.blocks.num_hit_tokens > 3 * 16
    assert [driver.finishes[handle].num_cached_tokens for handle in range(5)] == [0, 0, 16, 8, 8]


def test_cost_model_compares_measured_costs() -> None:
    costs = CostModel(swap_blocks_per_s=100.0)
    assert costs.swap_is_cheaper(10, 160)  # nothing measured yet
    costs.observe(1000, 1.0)
    assert costs.prefill_tokens_per_s == 1000.0
    assert not costs.swap_is_cheaper(10, 160)  # 0.2 s against 0.16 s
    assert costs.swap_is_cheaper(10, 250)
    assert not CostModel(swap_blocks_per_s=0.0).swap_is_cheaper(1, 10**6)


def test_cost_model_counts_the_move_of_a_state() -> None:
    costs = CostModel(swap_blocks_per_s=100.0, swap_states_per_s=20.0)
    costs.observe(1000, 1.0)
    assert costs.swap_is_cheaper(10, 250)
    assert not costs.swap_is_cheaper(10, 250, has_state=True)  # 0.3 s against 0.25 s
    assert costs.swap_is_cheaper(10, 350, has_state=True)
    assert not CostModel(swap_blocks_per_s=100.0).swap_is_cheaper(1, 10**6, has_state=True)


def test_cost_model_counts_a_launched_step_with_the_next_done_step() -> None:
    costs = CostModel(swap_blocks_per_s=100.0)
    costs.observe(1000, 0.001, is_done=False)
    assert costs.prefill_tokens_per_s == 0.0
    assert costs.has_launched
    costs.observe(500, 1.499)
    assert costs.prefill_tokens_per_s == pytest.approx(1000.0)
    assert not costs.has_launched


def test_prefill_rate_is_measured_on_steps_full_of_prompt_tokens() -> None:
    driver = Driver(small_config(max_num_batched_tokens=8))
    gather, stages = (
        driver.group.gather,
        [{"forward": 0.1}, {"forward": 0.1, "sample": 1.8}, {"forward": 50.0}],
    )

    def gather_late(timeout_s: float) -> StepResult:
        return replace(gather(timeout_s), stage_times=stages.pop(0) if stages else {})

    driver.group.gather = gather_late  # type: ignore[method-assign]
    driver.add(
        0, random_prompt(16), max_tokens=3, ignore_eos=True
    )  # two chunks, of which the second samples; then it decodes
    driver.run()
    assert driver.scheduler._state.costs.prefill_tokens_per_s == pytest.approx(16 / 2.0)
    stages += [{"forward": 9.0}]
    driver.add(1, random_prompt(3, 1), max_tokens=1)  # takes as long as a full step
    driver.run()
    assert not stages
    assert driver.scheduler._state.costs.prefill_tokens_per_s == pytest.approx(16 / 2.0)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest-prefill", "fair", "longest-prefix"])
def test_waiting_queue_drops_removed_entries_that_never_reach_the_top(policy: str) -> None:
    """Bounds the memory: callers may submit and abort any number of requests behind others."""
    queue = WaitingQueue(policy, lambda sequence: 0)
    queue.push(make_sequence(0, num_prompt_tokens=1, priority=9))
    for number in range(1, 2000):
        aborted = make_sequence(number, num_prompt_tokens=5, priority=0)
        queue.push(aborted)
        reference = weakref.ref(aborted.token_ids)
        queue.remove(aborted)
        del aborted
        if number == 1:
            first = reference
    assert len(queue) == 1
    assert first() is None
    assert not_none(queue.peek()).seq_id == 0


POLICIES = ["fcfs", "priority", "shortest-prefill", "fair", "longest-prefix"]


def make_queue(policy: str) -> WaitingQueue:
    """Return a queue of ten sequences of two tenants; sequences 8 and 9 ran before."""
    queue = WaitingQueue(policy, lambda sequence: sequence.num_prompt_tokens)
    for number in range(10):
        sequence = make_sequence(number, num_prompt_tokens=number * 7 % 5, priority=number * 3 % 4)
        sequence.tenant, sequence.has_run = "ab"[number % 3 == 0], number >= 8
        queue.push(sequence)
    return queue


@pytest.mark.parametrize("policy", POLICIES)
def test_waiting_queue_peeks_past_sequences_in_the_order_of_the_policy(policy: str) -> None:
    queue, passed = make_queue(policy), set[int]()
    first = not_none(queue.peek()).seq_id
    while (sequence := queue.peek(passed)) is not None:
        rest = make_queue(policy)
        for other in [each for each in _all_of(rest) if each.seq_id in passed]:
            rest.remove(other)
        assert sequence.seq_id == not_none(rest.peek()).seq_id
        passed.add(sequence.seq_id)
    assert len(passed) == len(queue) == 10
    assert not_none(queue.peek()).seq_id == first


@pytest.mark.parametrize("policy", POLICIES)
def test_sequence_that_keeps_its_turn_goes_before_later_preempted_ones(policy: str) -> None:
    queue = make_queue(policy)
    for number, sequence in enumerate(_all_of(queue)):
        if number in (8, 9):
            queue.remove(sequence)
    kept = not_none(queue.peek())
    queue.keep_turn(kept)
    queue.keep_turn(kept)
    preempted = make_sequence(20, num_prompt_tokens=1, priority=-kept.rank)
    preempted.has_run = True
    queue.push(preempted)
    assert queue.peek() is kept
    queue.remove(kept)
    assert queue.peek() is preempted
    assert len(queue) == 8


def _all_of(queue: WaitingQueue) -> list[Sequence]:
    """Return the sequences of a queue by number."""
    found: dict[int, Sequence] = {}
    while (sequence := queue.peek(found)) is not None:
        found[sequence.seq_id] = sequence
    return [sequence for _, sequence in sorted(found.items())]


def make_sequence(number: int, num_prompt_tokens: int, priority: int) -> Sequence:
    return Sequence(
        seq_id=number, arrival=number, gateway=b"", handle=number, request_id="", sampling=SamplingParams(),
        seed=0, num_prompt_tokens=num_prompt_tokens, max_len=9, token_ids=array("i"), eos_token_ids=(),
        arrived_at=0.0, rank=-priority,
    )  # fmt: skip
