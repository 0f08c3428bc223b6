from typing import Any

import numpy as np
import pytest
from driver import GATEWAY, Driver
from fakes import EOS, VOCAB_SIZE, oracle, random_prompt, small_config, submit
from narrowing import not_none

from quire.proto.errors import ProtocolError, ReplicaUnavailable
from quire.proto.step import StepResult
from quire.proto.stream import FinishReason
from quire.scheduler.core.planning.placement import Place, Placement
from quire.scheduler.sequences.sequence import Sequence


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 33])
def test_one_sequence_equals_the_oracle(length: int, depth: int) -> None:
    driver = Driver(small_config())
    driver.add(0, random_prompt(length), max_tokens=20)
    driver.run(depth)
    assert driver.outputs[0] == oracle(random_prompt(length), 20)
    assert driver.scheduler.blocks.num_held_blocks == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_many_sequences_in_a_small_pool_equal_the_oracle(depth: int) -> None:
    driver = Driver(small_config(num_blocks=14))
    for handle in range(50):
        assert (
            driver.add(handle, random_prompt(5 + handle % 20, handle), max_tokens=12, ignore_eos=True) is None
        )
    driver.run(depth)
    assert driver.scheduler.stats.num_preemptions > 0
    for handle in range(50):
        assert driver.outputs[handle] == oracle(random_prompt(5 + handle % 20, handle), 12, stops=())


def test_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    driver = Driver(small_config(max_num_batched_tokens=8))
    driver.add(0, random_prompt(4), max_tokens=30, ignore_eos=True)
    driver.step()
    driver.add(1, random_prompt(40, 1), max_tokens=2, ignore_eos=True)
    before = len(driver.outputs[0])
    driver.step()
    assert driver.plans[-1].chunk_lens.tolist() == [7]
    while not driver.outputs[1]:
        driver.step()
    assert len(driver.outputs[0]) - before == 6  # one token a step, all along the six chunks of 40 tokens


def test_no_step_exceeds_the_token_budget() -> None:
    driver = Driver(small_config(max_num_batched_tokens=10, max_num_seqs=6))
    for handle in range(12):
        driver.add(handle, random_prompt(9, handle), max_tokens=5, ignore_eos=True)
    before = 0
    while driver.step():
        executed = driver.group.num_executed_tokens - before
        assert executed <= 10
        before = driver.group.num_executed_tokens


def test_no_prefix_is_looked_for_while_every_row_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_for: list[int] = []
    find_places = Placement.places_for

    def places_for(self: Placement, sequence: Sequence) -> list[Place]:
        looked_for.append(sequence.handle)
        return find_places(self, sequence)

    monkeypatch.setattr(Placement, "places_for", places_for)
    driver = Driver(small_config(max_num_seqs=1))
    for handle in range(2):
        driver.add(handle, random_prompt(9, handle), max_tokens=5, ignore_eos=True)
    driver.run()
    assert looked_for == [0, 1]
    assert driver.outputs[1] == oracle(random_prompt(9, 1), 5, stops=())


def test_request_with_cached_prefix_computes_only_the_rest() -> None:
    driver = Driver(small_config())
    head = random_prompt(16)
    driver.add(0, [*head, 7, 8], max_tokens=1)
    driver.run()
    driver.add(1, [*head, 9], max_tokens=1)
    driver.run()
    assert driver.plans[-1].new[0].num_computed_tokens == 16
    assert driver.plans[-1].chunk_lens.tolist() == [1]
    assert driver.finishes[1].num_cached_tokens == 16
    assert driver.outputs[1] == oracle([*head, 9], 1)


def test_requests_of_one_step_share_a_prefix_computed_in_it() -> None:
    driver = Driver(small_config(max_num_batched_tokens=64))
    head = random_prompt(16)
    driver.add(0, [*head, 7], max_tokens=1)
    driver.add(1, [*head, 9], max_tokens=1)
    driver.run()
    assert driver.plans[0].chunk_lens.tolist() == [17, 1]
    assert driver.outputs[1] == oracle([*head, 9], 1)


def test_next_turn_reuses_generated_tokens() -> None:
    driver = Driver(small_config())
    driver.add(0, random_prompt(6), max_tokens=10, ignore_eos=True)
    driver.run()
    history = random_prompt(6) + driver.outputs[0]
    driver.add(1, [*history, 5], max_tokens=1)
    driver.run()
    # 15 of the 16 were computed: three full blocks of 4 that are shared, and three tokens that are copied.
    assert driver.finishes[1].num_cached_tokens == 15
    assert driver.plans[-1].copies.shape == (1, 2)


def test_without_prefix_caching_nothing_is_shared() -> None:
    driver = Driver(small_config(prefix_caching=False))
    for handle in range(2):
        driver.add(handle, random_prompt(20), max_tokens=3, ignore_eos=True)
        driver.run()
    assert driver.finishes[1].num_cached_tokens == 0
    assert driver.outputs[0] == driver.outputs[1]


def test_abort_frees_blocks_at_once_and_sends_no_finish() -> None:
    driver = Driver(small_config())
    driver.add(0, random_prompt(12), max_tokens=30, ignore_eos=True)
    driver.step()
    assert driver.scheduler.blocks.num_held_blocks > 0
    assert driver.abort(0)
    assert driver.scheduler.blocks.num_held_blocks == 0
    received = list(driver.outputs[0])
    driver.run()
    assert driver.outputs[0] == received
    assert 0 not in driver.finishes
    assert not driver.abort(0)


def test_token_sampled_after_a_stop_is_dropped() -> None:
    for seed in range(200):
        expected = oracle(random_prompt(5, seed), 40)
        if expected[-1] == EOS and len(expected) < 40:
            break
    driver = Driver(small_config())
    driver.add(0, random_prompt(5, seed), max_tokens=40)
    driver.run(depth=2)
    assert driver.outputs[0] == expected
    assert driver.finishes[0].reason is FinishReason.STOP
    assert driver.finishes[0].stop_token_id is None


def test_finish_names_own_stop_token() -> None:
    expected = oracle(random_prompt(5), 40, stops=())
    stop = expected[6]
    cut = expected[: expected.index(stop) + 1]
    driver = Driver(small_config())
    driver.add(0, random_prompt(5), max_tokens=40, ignore_eos=True, stop_token_ids=(stop,))
    driver.run(depth=2)
    assert driver.outputs[0] == cut
    assert driver.finishes[0].stop_token_id == stop


def test_finish_reports_timings() -> None:
    driver = Driver(small_config(max_num_seqs=1))
    driver.add(0, random_prompt(5), max_tokens=4, ignore_eos=True)
    driver.add(1, random_prompt(6, 1), max_tokens=2, ignore_eos=True)
    while driver.step():
        driver.now += 1.0
    first, second = driver.finishes[0], driver.finishes[1]
    assert (first.timings.queued_s, first.timings.prefill_s, first.timings.decode_s) == (0.0, 0.0, 3.0)
    assert second.timings.queued_s == 4.0
    assert (first.num_prompt_tokens, first.num_completion_tokens, first.reason) == (5, 4, FinishReason.LENGTH)


def test_finish_reports_preempted_time_and_recomputed_tokens() -> None:
    driver = Driver(small_config(num_blocks=9, prefix_caching=False, max_model_len=32))
    for handle in range(2):
        driver.add(handle, random_prompt(10, handle), max_tokens=16, ignore_eos=True)
    while driver.step():
        driver.now += 1.0
    assert driver.finishes[0].timings.preempted_s == 0
    assert driver.finishes[1].timings.preempted_s > 0
    assert driver.finishes[1].timings.recomputed_tokens >= 10


def test_oldest_sequence_is_never_preempted() -> None:
    driver = Driver(small_config(num_blocks=12, max_model_len=40))
    for handle in range(12):
        driver.add(handle, random_prompt(6, handle), max_tokens=30, ignore_eos=True)
    while 0 not in driver.finishes:
        driver.step(depth=2)
    assert driver.finishes[0].timings.recomputed_tokens == 0


def test_rejected_requests_leave_no_state() -> None:
    driver = Driver(small_config(num_blocks=5, max_queue_len=1))
    assert "has 16 tokens, must have 1 to 15" in not_none(driver.add(0, random_prompt(16))).error
    assert driver.add(1, random_prompt(3)) is None
    assert not_none(driver.add(2, random_prompt(3))).grpc_status == "RESOURCE_EXHAUSTED"
    assert not_none(driver.scheduler.add(GATEWAY, submit(1, random_prompt(3)), 0.0)).grpc_status == "INTERNAL"
    driver.run()
    assert not driver.scheduler.has_work


def test_prompt_that_fills_the_pool_is_served() -> None:
    driver = Driver(small_config(num_blocks=5))
    driver.add(0, random_prompt(15), max_tokens=10)
    driver.run()
    assert driver.outputs[0] == oracle(random_prompt(15), 1)
    assert driver.finishes[0].reason in (FinishReason.LENGTH, FinishReason.STOP)


def test_each_gateway_receives_only_its_own_requests() -> None:
    driver = Driver(small_config())
    for handle in range(6):
        driver.scheduler.add(
            b"%d" % (handle % 2), submit(handle, random_prompt(4, handle), max_tokens=3), 0.0
        )
    received: dict[bytes, set[int]] = {b"0": set(), b"1": set()}
    while driver.scheduler.has_work:
        driver.plan()
        for gateway, batch in driver.scheduler.apply(driver.group.gather(1.0), 0.0):
            received[gateway] |= set(batch.handles.tolist()) | {finish.handle for finish in batch.finished}
    assert received == {b"0": {0, 2, 4}, b"1": {1, 3, 5}}


def test_result_of_another_step_or_epoch_is_rejected() -> None:
    driver = Driver(small_config())
    driver.add(0, random_prompt(4), max_tokens=3)
    driver.plan()
    one = np.array([3], np.int32)
    with pytest.raises(ProtocolError, match="is due"):
        driver.scheduler.apply(StepResult(2, 1, 0, one), 0.0)
    with pytest.raises(ProtocolError, match="is due"):
        driver.scheduler.apply(StepResult(1, 9, 0, one), 0.0)
    with pytest.raises(ProtocolError, match="samples 1 tokens, 0 came"):
        driver.scheduler.apply(StepResult(1, 1, 0), 0.0)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"prompt": [5, VOCAB_SIZE]}, "prompt: has token ids from 5 to 64, must be from 0 to 63"),
        ({"prompt": [-1]}, "prompt: has token ids from -1 to -1"),
        ({"prompt": [5], "generated": [VOCAB_SIZE]}, "generated_token_ids: has token ids"),
        ({"prompt": [5], "timeout_s": float("nan")}, "its deadline had passed"),
        ({"prompt": [5], "beam_width": 9}, "sampling.beam_width: is 9, must be at most 8"),
        ({"prompt": [5], "beam_width": 3, "stop_token_ids": range(2, 63)}, "must be at most 2"),
    ],
)
def test_request_that_would_fail_a_step_is_rejected(settings: dict[str, Any], field: str) -> None:
    driver = Driver(small_config())
    rejection = driver.add(0, **settings)
    assert rejection is not None
    assert field in rejection.error
    assert not driver.scheduler.has_work


def test_fail_all_ends_every_sequence_with_the_error() -> None:
    driver = Driver(small_config(max_num_seqs=2))
    for handle in range(5):
        driver.add(handle, random_prompt(4, handle), max_tokens=9)
    driver.plan()
    outgoing = driver.scheduler.fail_all(ReplicaUnavailable("rank 1 died"))
    finished = [finish for _, batch in outgoing for finish in batch.finished]
    assert {finish.handle for finish in finished} == set(range(5))
    assert {finish.grpc_status for finish in finished} == {"UNAVAILABLE"}
    driver.scheduler.check_integrity()
    assert not driver.scheduler.has_work
    assert driver.scheduler.blocks.num_held_blocks == 0


def test_fragmentation_counts_unused_slots_of_allocated_blocks() -> None:
    driver = Driver(small_config())
    driver.add(0, random_prompt(5), max_tokens=1)
    driver.run()
    assert driver.scheduler.stats.mean_kv_fragmentation == pytest.approx(3 / 8)
