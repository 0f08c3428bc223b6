"""Sequences that take their KV along: two replicas under random orders of events, with planted faults.

The fake ranks check each read of the KV cache, so that a block with the KV of other tokens is found at once.
"""

from __future__ import annotations

from typing import Any

import pytest
from driver import GATEWAY, Driver
from fake_kv_peer import FakeKvNetwork, FakeKvPeer
from fakes import IMAGE_TOKEN, VOCAB_SIZE, images_of, oracle, random_prompt, see, small_config, submit
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from quire.proto.kv_transfer import KvFailure, KvReport, KvReportKind
from quire.proto.lora import LoraReference
from quire.proto.media import MediaItem
from quire.proto.stream import FinishReason
from quire.scheduler.core.queue.kv_moves import FetchedPrompts
from quire.scheduler.kv.kv_tiers import KvTiers
from quire.scheduler.kv.leases import LEASE_S, Leases
from quire.scheduler.kv.pulls import Pull
from quire.scheduler.kv.state_slots import StateSlots

PROMPT = random_prompt(13)
IMAGE = b"i" * 16
FETCH_HANDLE = 50_000


def make_replica(network: FakeKvNetwork, name: str, weights: str = "w", **config: Any) -> Driver:
    """Return a replica whose ranks serve their blocks; a first token has proved it."""
    driver = Driver(small_config(kv_transfer=True, **config), images=images_of([IMAGE]))
    driver.group.kv_peer = FakeKvPeer(
        network, name, lambda: driver.group.kv, weights, lambda: driver.group.states
    )
    driver.add(10_000, [2, 3], max_tokens=1)
    driver.run()
    driver.outputs.clear()
    driver.finishes.clear()
    driver.scheduler.blocks.flush_cache()
    return driver


def peer_of(driver: Driver) -> FakeKvPeer:
    assert driver.group.kv_peer is not None
    return driver.group.kv_peer


def hand_off(driver: Driver, handle: int) -> None:
    """Let a sequence leave a replica as a drain does."""
    driver.scheduler._state.hand_off((GATEWAY, handle), driver.now)
    driver.record(driver.scheduler.take_outgoing())
    driver.scheduler.check_integrity()


def pair(**config: Any) -> tuple[FakeKvNetwork, Driver, Driver]:
    network = FakeKvNetwork()
    return network, make_replica(network, "a", **config), make_replica(network, "b", **config)


def leave_after(source: Driver, num_tokens: int, handle: int = 1) -> None:
    """Run a request on a replica until it has tokens, then let it leave."""
    source.add(handle, PROMPT, max_tokens=20)
    while len(source.outputs[handle]) < num_tokens:
        source.step()
    hand_off(source, handle)


def arrive(source: Driver, target: Driver, handle: int = 1) -> None:
    """Submit a sequence that has left a replica to the other one, with its KV."""
    target.outputs[handle] = []
    target.add(handle, PROMPT, max_tokens=20, generated=source.outputs[handle], kv=source.moved[handle].kv)


def test_sequence_continues_on_the_blocks_that_it_brings() -> None:
    _, source, target = pair()
    leave_after(source, 6)
    offer = source.moved[1].kv
    assert offer is not None
    assert offer.num_blocks == (13 + 6 - 1) // 4
    source.step()  # the ranks learn of the lease
    arrive(source, target)
    before = target.group.num_executed_tokens
    target.step()
    assert target.scheduler.num_waiting == 1, "it does not wait for its blocks"
    peer_of(target).read(1)
    target.run()
    assert source.outputs[1] + target.outputs[1] == oracle(PROMPT, 20)
    total = len(PROMPT) + len(oracle(PROMPT, 20)) - 1
    assert target.group.num_executed_tokens - before == total - 4 * offer.num_blocks
    status = target.scheduler.kv_moves
    assert (status.num_kv_pulls, status.num_kv_pulled_tokens) == (1, 4 * offer.num_blocks)
    assert target.finishes[1].timings.recomputed_tokens == 18 - 4 * offer.num_blocks
    source.run()
    assert source.scheduler.kv_moves.num_kv_leases == 0, "the reader does not release the lease"
    assert source.scheduler.blocks.num_held_blocks == 0


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_prefill_only_sequence_leaves_with_its_first_token(steps_in_flight: int) -> None:
    network = FakeKvNetwork()
    source, target = make_replica(network, "a", role="prefill"), make_replica(network, "b", role="decode")
    source.add(1, PROMPT, max_tokens=20, prefill_only=True)
    for _ in range(steps_in_flight - 1):
        source.plan()
    while 1 not in source.moved:
        source.step()
    assert source.outputs[1] == oracle(PROMPT, 20)[:1]
    assert source.moved[1].kv is not None
    source.step()  # the ranks learn of the lease
    arrive(source, target)
    target.step()
    peer_of(target).read(1)
    target.now += 0.5
    target.run()
    assert source.outputs[1] + target.outputs[1] == oracle(PROMPT, 20)
    assert target.finishes[1].timings.transfer_s == 0.5
    assert source.scheduler._state.num_prefill_only == 0


def chunked_pair(network: FakeKvNetwork | None = None, **config: Any) -> tuple[Driver, Driver]:
    """Return a replica that computes prompts in chunks of 8 tokens, and one that continues the sequences."""
    network = network or FakeKvNetwork()
    config = {"max_num_batched_tokens": 8, "max_model_len": 64, "num_blocks": 40} | config
    return make_replica(network, "a", role="prefill", **config), make_replica(
        network, "b", role="decode", **config
    )


def fetch(source: Driver, target: Driver, prompt: list[int]) -> None:
    """Pass on what was lent of a prompt, as a gateway does, with the prompt once."""
    for lent in source.lent:
        is_first = target.outputs.pop(FETCH_HANDLE, None) is None
        target.add(FETCH_HANDLE, prompt if is_first else [], max_tokens=1, fetch_only=True, kv=lent.kv)
    source.lent.clear()


def read_all(target: Driver) -> None:
    for pull_id in sorted(peer_of(target).pulls):
        peer_of(target).read(pull_id)


LONG_PROMPT = random_prompt(29)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_chunks_of_a_prompt_travel_while_the_rest_is_computed(steps_in_flight: int) -> None:
    source, target = chunked_pair()
    source.add(1, LONG_PROMPT, max_tokens=20, prefill_only=True)
    num_ahead = 0
    while 1 not in source.moved:
        source.step(steps_in_flight)
        read_all(target)  # of chunks whose leases the ranks have heard of in this step
        assert all(lent.handle == 1 for lent in source.lent)
        num_ahead = max([num_ahead, *(4 * lent.kv.num_blocks for lent in source.lent)])
        fetch(source, target, LONG_PROMPT)
        target.step()
    source.step()
    read_all(target)
    target.step()
    assert num_ahead == 24, "three chunks were computed before the last one"
    assert target.scheduler.kv_moves.num_kv_ahead_tokens == 24
    target.outputs[1] = []
    target.add(1, LONG_PROMPT, max_tokens=20, generated=source.outputs[1], kv=source.moved[1].kv)
    source.step()
    target.step()
    ((pull_id, pull),) = peer_of(target).pulls.items()
    assert pull.sources.size == 1, "what has come already is read again"
    peer_of(target).read(pull_id)
    before = target.group.num_executed_tokens
    target.run()
    assert source.outputs[1] + target.outputs[1] == oracle(LONG_PROMPT, 20)
    assert target.group.num_executed_tokens - before == len(LONG_PROMPT) + 20 - 1 - 28
    source.run()
    assert source.scheduler.kv_moves.num_kv_leases == 0
    assert target.scheduler.blocks.num_held_blocks == source.scheduler.blocks.num_held_blocks == 0


@pytest.mark.parametrize("windows", [(), (0, 5, 5)])
def test_cached_prefix_is_lent_and_read_by_another_replica(windows: tuple[int, ...]) -> None:
    _, source, target = pair(num_blocks=60, max_model_len=64, layer_windows=windows)
    source.add(1, LONG_PROMPT, max_tokens=1)
    source.run()
    assert source.add(2, LONG_PROMPT[:17] + [1] * 5, lend_only=True) is None
    source.step()
    (lent,) = source.lent
    assert (lent.handle, lent.kv.num_blocks) == (2, 4)
    target.add(FETCH_HANDLE, LONG_PROMPT, max_tokens=1, fetch_only=True, kv=lent.kv)
    target.step()
    read_all(target)
    target.step()
    assert target.scheduler.kv_moves.num_kv_ahead_tokens == 16
    target.add(3, LONG_PROMPT, max_tokens=8)
    before = target.group.num_executed_tokens
    target.run()
    assert target.outputs[3] == oracle(LONG_PROMPT, 8)
    assert target.group.num_executed_tokens - before == len(LONG_PROMPT) + 8 - 1 - 16
    source.run()
    assert source.scheduler.kv_moves.num_kv_leases == source.scheduler.blocks.num_held_blocks == 0


def test_prefix_in_host_memory_is_loaded_before_it_is_lent() -> None:
    _, source, target = pair(num_blocks=14, num_host_blocks=20, max_model_len=64)
    source.add(1, LONG_PROMPT, max_tokens=1)
    source.run()
    source.add(2, random_prompt(40, 9), max_tokens=1)
    source.run()
    blocks = source.scheduler.blocks
    assert blocks.host is not None
    assert blocks.host.num_cached > 0
    assert source.add(3, LONG_PROMPT, lend_only=True) is None
    source.step()
    assert not peer_of(source).leases, "the ranks serve blocks that this step fills"
    source.step()
    (lent,) = source.lent
    assert lent.kv.num_blocks == 7
    assert list(peer_of(source).leases) == [lent.kv.generation]
    target.add(FETCH_HANDLE, LONG_PROMPT, max_tokens=1, fetch_only=True, kv=lent.kv)
    target.step()
    read_all(target)
    target.step()
    target.add(4, LONG_PROMPT, max_tokens=8)
    before = target.group.num_executed_tokens
    target.run()
    assert target.outputs[4] == oracle(LONG_PROMPT, 8)
    assert target.group.num_executed_tokens - before == len(LONG_PROMPT) + 8 - 1 - 28
    source.run()
    assert source.scheduler.kv_moves.num_kv_leases == blocks.num_held_blocks == 0
    source.add(5, LONG_PROMPT, max_tokens=8)
    source.run()
    assert source.outputs[5] == oracle(LONG_PROMPT, 8)


def test_loan_of_blocks_that_are_loaded_may_end_before_they_are() -> None:
    _, source, _ = pair(num_blocks=14, num_host_blocks=20, max_model_len=64)
    for handle, prompt in enumerate((LONG_PROMPT, random_prompt(40, 9))):
        source.add(handle, prompt, max_tokens=1)
        source.run()
    source.add(3, LONG_PROMPT, lend_only=True)
    source.add(4, random_prompt(44, 8), max_tokens=4)  # needs the blocks
    source.now += 60.0
    source.run()
    assert source.outputs[4] == oracle(random_prompt(44, 8), 4)
    assert source.scheduler.blocks.num_held_blocks == 0


def test_replica_whose_sequences_fill_its_memory_lends_nothing() -> None:
    _, source, _ = pair(num_blocks=14, max_model_len=64)
    source.add(1, LONG_PROMPT, max_tokens=8)
    source.step(1)
    source.step(1)
    assert source.add(2, LONG_PROMPT, lend_only=True) is not None


def test_prefix_that_is_not_cached_is_not_lent() -> None:
    _, source, _ = pair()
    refusal = source.add(1, PROMPT, lend_only=True)
    assert refusal is not None
    assert refusal.reason is FinishReason.ERROR
    source.add(2, PROMPT, max_tokens=1)
    source.run()
    source.scheduler.drain(0.0, source.now)
    assert source.add(3, PROMPT, lend_only=True) is not None, "a replica that drains waits for no reader"


def test_fetch_without_a_prompt_that_is_known_does_nothing() -> None:
    source, target = chunked_pair()
    source.add(1, LONG_PROMPT, max_tokens=20, prefill_only=True)
    while 1 not in source.moved:
        source.step()
    target.add(FETCH_HANDLE, [], max_tokens=1, fetch_only=True, kv=source.lent[0].kv)
    target.step()
    assert not len(target.scheduler.blocks.pulls)


def test_prompts_of_fetches_are_bounded() -> None:
    prompts = FetchedPrompts(max_tokens=10)
    first, second = (submit(handle, [1] * 6, fetch_only=True) for handle in (1, 2))
    assert prompts.complete(b"g", first) == first
    assert prompts.complete(b"g", second) == second
    again = [prompts.complete(b"g", submit(handle, [], fetch_only=True)) for handle in (1, 2)]
    assert again == [None, second]
    assert prompts.complete(b"other", submit(2, [], fetch_only=True)) is None
    assert prompts.complete(b"g", submit(2, [1] * 4, fetch_only=True)) is not None
    assert prompts.complete(b"g", submit(3, [1] * 6, fetch_only=True)) is not None
    assert prompts.complete(b"g", submit(2, [], fetch_only=True)) is not None, "its tokens are counted twice"


def test_sequence_does_not_read_again_what_a_fetch_is_reading() -> None:
    source, target = chunked_pair()
    source.add(1, LONG_PROMPT, max_tokens=20, prefill_only=True)
    while 1 not in source.moved:
        source.step()
    fetch(source, target, LONG_PROMPT)
    target.outputs[1] = []
    target.add(1, LONG_PROMPT, max_tokens=20, generated=source.outputs[1], kv=source.moved[1].kv)
    source.step()
    target.step()
    assert [pull.sources.size for pull in peer_of(target).pulls.values()] == [2, 2, 2, 1]
    read_all(target)
    before = target.group.num_executed_tokens
    target.run()
    assert source.outputs[1] + target.outputs[1] == oracle(LONG_PROMPT, 20)
    assert target.group.num_executed_tokens - before == len(LONG_PROMPT) + 20 - 1 - 28


def test_prompt_is_computed_from_the_chunks_that_came_when_its_replica_dies() -> None:
    network = FakeKvNetwork()
    source, target = chunked_pair(network)
    source.add(1, LONG_PROMPT, max_tokens=20, prefill_only=True)
    for _ in range(3):
        source.step()
    fetch(source, target, LONG_PROMPT)
    target.step()
    first, *_ = sorted(peer_of(target).pulls)
    peer_of(target).read(first)
    peer_of(source).restart()
    read_all(target)
    target.step()
    before = target.group.num_executed_tokens
    target.add(1, LONG_PROMPT, max_tokens=20)
    target.run()
    assert target.outputs[1] == oracle(LONG_PROMPT, 20)
    assert target.group.num_executed_tokens - before == len(LONG_PROMPT) + 20 - 1 - 8
    assert target.scheduler.kv_moves.num_kv_failures[list(KvFailure).index(KvFailure.UNREACHABLE)] > 0


@pytest.mark.parametrize("end", ["deadline", "lost ranks", "drain"])
def test_fetch_ends_without_its_sequence(end: str) -> None:
    source, target = chunked_pair()
    source.add(1, LONG_PROMPT, max_tokens=20, prefill_only=True)
    while 1 not in source.moved:
        source.step()
    if end == "drain":
        target.scheduler.drain(0.0, target.now)
    fetch(source, target, LONG_PROMPT)
    if end == "deadline":
        target.step()
        target.now += 60.0
    elif end == "lost ranks":
        target.step()
        target.lose_ranks()
    for _ in range(5):
        read_all(target)
        target.step()
    assert not len(target.scheduler.blocks.pulls)
    assert target.scheduler.blocks.num_held_blocks == 0
    source.now += 60.0
    source.run()
    assert source.scheduler.blocks.num_held_blocks == 0, "leases that nobody reads stay"


def test_small_chunks_do_not_travel_by_themselves() -> None:
    source, _ = chunked_pair()
    source.scheduler._state.costs.prefill_tokens_per_s = 1000.0  # a chunk takes 8 ms
    source.add(1, LONG_PROMPT, max_tokens=20, prefill_only=True)
    while 1 not in source.moved:
        source.scheduler._state.costs.prefill_tokens_per_s = 1000.0
        source.step()
    assert [lent.kv.num_blocks for lent in source.lent] == [6]


def test_prefill_only_sequence_stays_where_its_blocks_cannot_be_lent() -> None:
    alone = Driver(small_config())
    alone.add(1, PROMPT, max_tokens=20, prefill_only=True)
    alone.run()
    assert alone.outputs[1] == oracle(PROMPT, 20)
    assert not alone.moved


def test_all_outputs_of_a_prompt_leave_and_continue() -> None:
    _, source, target = pair()
    source.add(1, PROMPT, max_tokens=12, prefill_only=True, n=3, temperature=1.0, seed=5)
    alone = Driver(small_config())
    alone.add(1, PROMPT, max_tokens=12, n=3, temperature=1.0, seed=5)
    alone.run()
    while len(source.moved) < 3:
        source.step()
    source.step()
    for handle in (1, 2, 3):
        target.outputs[handle] = []
        target.add(
            handle, PROMPT, max_tokens=12, temperature=1.0, seed=5 + handle - 1,
            generated=source.outputs[handle], kv=source.moved[handle].kv,
        )  # fmt: skip
    target.step()
    assert list(peer_of(target).pulls) == [1], "each output reads the blocks of the prompt"
    peer_of(target).read(1)
    target.run()
    for handle in (1, 2, 3):
        assert source.outputs[handle] + target.outputs[handle] == alone.outputs[handle]
    source.step()
    assert source.scheduler.kv_moves.num_kv_leases == 0, "leases of blocks that nobody reads stay"


def test_outputs_of_a_prompt_go_on_when_the_one_that_reads_is_aborted() -> None:
    _, source, target = pair()
    source.add(1, PROMPT, max_tokens=12, prefill_only=True, n=2, temperature=1.0, seed=5)
    alone = Driver(small_config())
    alone.add(1, PROMPT, max_tokens=12, n=2, temperature=1.0, seed=5)
    alone.run()
    while len(source.moved) < 2:
        source.step()
    source.step()
    for handle in (1, 2):
        target.outputs[handle] = []
        target.add(
            handle, PROMPT, max_tokens=12, temperature=1.0, seed=5 + handle - 1,
            generated=source.outputs[handle], kv=source.moved[handle].kv,
        )  # fmt: skip
    target.step()
    target.abort(1)
    for _ in range(3):
        target.step()
        for pull_id in list(peer_of(target).pulls):
            peer_of(target).read(pull_id)
    target.run()
    assert source.outputs[2] + target.outputs[2] == alone.outputs[2]


def test_prefill_only_sequence_may_end_with_its_first_token() -> None:
    _, source, _ = pair()
    source.add(1, PROMPT, max_tokens=1, prefill_only=True)
    source.run()
    assert source.outputs[1] == oracle(PROMPT, 1)
    assert not source.moved
    assert source.scheduler.kv_moves.num_kv_leases == 0


def test_sequence_with_an_image_brings_its_blocks() -> None:
    _, source, target = pair(encoder_cache_rows=30, eos=())
    items = (MediaItem(IMAGE, 3, 6, 6, num_bytes=16),)
    prompt = [5] * 3 + [IMAGE_TOKEN] * 6 + [6] * 4
    settings: dict[str, Any] = {"media": items, "max_tokens": 20}
    assert source.add(1, prompt, GATEWAY, **settings) is None
    while len(source.outputs[1]) < 6:
        source.step()
    hand_off(source, 1)
    source.step()
    target.outputs[1] = []
    moved = source.moved[1].kv
    assert moved is not None
    target.add(1, prompt, GATEWAY, generated=source.outputs[1], kv=moved, **settings)
    target.step()
    peer_of(target).read(1)
    target.run()
    assert source.outputs[1] + target.outputs[1] == oracle(see(prompt, items), 20, ())
    assert target.scheduler.kv_moves.num_kv_pulled_tokens == 4 * moved.num_blocks


def test_sequence_with_an_adapter_brings_its_blocks() -> None:
    _, source, target = pair(enable_lora=True)
    adapter = LoraReference("poet", "/adapters/poet", "1")
    source.add(1, PROMPT, max_tokens=20, lora=adapter)
    while len(source.outputs[1]) < 6:
        source.step()
    hand_off(source, 1)
    source.step()
    target.outputs[1] = []
    moved = source.moved[1].kv
    assert moved is not None
    for handle, lora in ((1, adapter), (2, LoraReference("poet", "/adapters/poet", "2"))):
        target.outputs[handle] = []
        target.add(handle, PROMPT, max_tokens=20, lora=lora, generated=source.outputs[1], kv=moved)
    for _ in range(5):  # the adapter is loaded first
        target.step()
    peer_of(target).read(1)
    target.run()
    assert source.outputs[1] + target.outputs[1] == oracle(PROMPT, 20)
    assert target.scheduler.kv_moves.num_kv_pulled_tokens == 4 * moved.num_blocks, (
        "or the other version had them"
    )


def test_lease_that_nobody_renews_ends() -> None:
    _, source, target = pair()
    leave_after(source, 6)
    source.step()
    held = source.scheduler.blocks.num_held_blocks
    assert held == 4
    source.now += LEASE_S
    source.run()
    assert source.scheduler.blocks.num_held_blocks == 0
    arrive(source, target)
    target.step()
    peer_of(target).read(1)
    target.run()
    assert source.outputs[1] + target.outputs[1] == oracle(PROMPT, 20)
    assert target.scheduler.kv_moves.num_kv_failures[list(KvFailure).index(KvFailure.STALE)] == 1


def test_lease_lasts_as_long_as_it_is_renewed() -> None:
    _, source, _ = pair()
    leave_after(source, 6)
    for _ in range(4):
        source.now += LEASE_S / 2
        source.step()
        generation = source.moved[1].kv.generation if source.moved[1].kv else 0
        peer_of(source).reports.append(KvReport(0, KvReportKind.RENEWED, generation))
        source.step()
        assert source.scheduler.kv_moves.num_kv_leases == 1


def test_pull_without_an_answer_ends_at_its_deadline_and_keeps_its_blocks() -> None:
    _, source, target = pair()
    leave_after(source, 6)
    source.step()
    arrive(source, target)
    target.step()
    (pull,) = target.scheduler.blocks.pulls
    target.now = pull.deadline
    while not target.finishes:
        target.step()
    assert source.outputs[1] + target.outputs[1] == oracle(PROMPT, 20)
    target.run()  # the rank reports that it has stopped
    assert target.scheduler.blocks.num_held_blocks == 0


def test_blocks_that_ranks_may_write_to_are_held_after_an_abort() -> None:
    _, source, target = pair()
    leave_after(source, 6)
    source.step()
    arrive(source, target)
    target.step()
    (pull,) = target.scheduler.blocks.pulls
    written = [block.target for block in pull.targets]
    target.abort(1)
    assert target.scheduler.blocks.pulls.held == written
    peer_of(target).read(1)
    target.run()  # the rank reports that it has stopped
    assert target.scheduler.blocks.num_held_blocks == 0


def test_blocks_that_came_for_a_later_sequence_are_freed_for_an_earlier_one() -> None:
    _, source, target = pair(num_blocks=10, policy="priority")
    leave_after(source, 6)
    source.step()
    arrive(source, target)
    target.step()
    first = random_prompt(30, 2)
    target.add(2, first, max_tokens=2, priority=1)  # 8 blocks, of which 6 are free
    peer_of(target).read(1)
    target.run()
    assert target.outputs[2] == oracle(first, 2)
    assert source.outputs[1] + target.outputs[1] == oracle(PROMPT, 20)


def test_blocks_of_other_weights_are_not_taken() -> None:
    network = FakeKvNetwork()
    source, target = make_replica(network, "a"), make_replica(network, "b", weights="other")
    leave_after(source, 6)
    arrive(source, target)
    target.run()
    assert source.outputs[1] + target.outputs[1] == oracle(PROMPT, 20)
    assert not len(target.scheduler.blocks.pulls)


def test_blocks_are_read_only_if_that_is_faster() -> None:
    _, source, target = pair()
    leave_after(source, 6)
    arrive(source, target)
    target.scheduler._state.costs.prefill_tokens_per_s = 1e6  # 16 tokens in 16 us
    target.step()
    assert not len(target.scheduler.blocks.pulls)


def test_running_sequences_come_before_leases() -> None:
    _, source, _ = pair(num_blocks=8)
    leave_after(source, 6)
    prompt = next(each for each in map(random_prompt, [8] * 50, range(50)) if len(oracle(each, 16)) == 16)
    source.add(2, prompt, max_tokens=16)
    while 2 not in source.finishes:
        source.step()
    assert source.outputs[2] == oracle(prompt, 16)
    assert source.scheduler.kv_moves.num_kv_leases == 0


def test_leases_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.scheduler.core.queue.kv_moves.MAX_LEASES", 1)
    _, source, _ = pair()
    for handle in (1, 2):
        leave_after(source, 6, handle)
    assert source.moved[1].kv is not None
    assert source.moved[2].kv is None


def test_replica_without_prefix_caching_lends_nothing() -> None:
    source = make_replica(FakeKvNetwork(), "a", prefix_caching=False)
    leave_after(source, 6)
    assert source.moved[1].kv is None


def test_sequence_takes_its_snapshot_along() -> None:
    _, source, target = pair(num_state_slots=6)
    leave_after(source, 6)
    offer = source.moved[1].kv
    assert offer is not None
    assert offer.state_slot > 0
    assert offer.num_blocks == 3, "the prompt's state was saved after its last whole block"
    source.step()
    arrive(source, target)
    before = target.group.num_executed_tokens
    target.step()
    peer_of(target).read(1)
    target.run()
    assert source.outputs[1] + target.outputs[1] == oracle(PROMPT, 20)
    assert target.group.num_executed_tokens - before == len(PROMPT) + len(oracle(PROMPT, 20)) - 1 - 12
    assert target.scheduler.kv_moves.num_kv_pulls == 1
    source.run()
    assert source.scheduler.kv_moves.num_kv_leases == 0
    for driver in (source, target):
        assert driver.scheduler.blocks.num_held_blocks == driver.scheduler.blocks.state_slots.num_held == 0


def test_sequence_without_a_snapshot_takes_nothing_along() -> None:
    _, source, _ = pair(num_state_slots=2)  # the row has the only slot
    leave_after(source, 6)
    assert source.moved[1].kv is None


@pytest.mark.parametrize("fault", ["torn", "stale"])
def test_state_that_was_not_read_is_computed(fault: str) -> None:
    network, source, target = pair(num_state_slots=6)
    leave_after(source, 6)
    source.step()
    arrive(source, target)
    before = target.group.num_executed_tokens
    target.step()
    if fault == "torn":
        network.tears = True
    else:
        source.now += 60.0
        source.step()
    peer_of(target).read(1)
    network.tears = False
    target.run()
    assert source.outputs[1] + target.outputs[1] == oracle(PROMPT, 20)
    assert target.group.num_executed_tokens - before == len(PROMPT) + len(oracle(PROMPT, 20)) - 1
    assert sum(target.scheduler.kv_moves.num_kv_failures) == 1
    assert target.scheduler.blocks.state_slots.num_held == 0


def test_snapshot_in_host_memory_is_lent_with_the_plan_after_the_next() -> None:
    _, source, target = pair(num_state_slots=3, num_host_state_slots=4, num_blocks=40, num_host_blocks=8)
    for handle, prompt in enumerate((LONG_PROMPT, random_prompt(29, 1), random_prompt(29, 2)), 10):
        source.add(handle, prompt, max_tokens=2)
        source.run()
    slots = source.scheduler.blocks.state_slots
    assert slots.num_host_snapshots > 0
    assert source.add(20, LONG_PROMPT, lend_only=True) is None
    source.step()
    assert not peer_of(source).leases, "the ranks serve a state that this step fills"
    source.step()
    offer = source.lent[0].kv
    assert offer.num_blocks == 7
    target.add(FETCH_HANDLE, LONG_PROMPT, max_tokens=1, fetch_only=True, kv=offer)
    target.step()
    read_all(target)
    target.step()
    before = target.group.num_executed_tokens
    target.add(1, LONG_PROMPT, max_tokens=4)
    target.run()
    assert target.outputs[1] == oracle(LONG_PROMPT, 4)
    assert target.group.num_executed_tokens - before == len(LONG_PROMPT) + 4 - 1 - 28


class TwoReplicas(RuleBasedStateMachine):
    """Requests that wander between two replicas with their KV, while ranks fail and messages are lost."""

    @initialize(
        num_blocks=st.integers(8, 24),
        layer_windows=st.sampled_from([(0,), (0,), (6,), (0, 5), (0, 9, 9)]),
        max_num_seqs=st.integers(1, 4),
        max_num_batched_tokens=st.integers(1, 24),
        num_host_blocks=st.sampled_from([0, 8]),
        num_speculative_tokens=st.sampled_from([0, 3]),
    )
    def start(self, **config: Any) -> None:
        self.begin(**config)

    def begin(self, **config: Any) -> None:
        self.network = FakeKvNetwork()
        names = ("a", "b")
        self.replicas = [make_replica(self.network, name, max_model_len=40, **config) for name in names]
        self.requests: dict[
            int, tuple[list[int], int, list[int]]
        ] = {}  # handle |-> prompt, length, tokens before
        self.place: dict[int, int] = {}  # handle |-> its replica
        self.num_made = 0
        self.fetched: set[tuple[int, int]] = (
            set()
        )  # requests whose prompt the reader of a replica's blocks has

    @rule(
        where=st.integers(0, 1),
        shared=st.integers(0, 16),
        own=st.lists(st.integers(2, VOCAB_SIZE - 1), min_size=1, max_size=6),
        max_tokens=st.integers(1, 16),
        splits=st.booleans(),
    )
    def arrives(self, where: int, shared: int, own: list[int], max_tokens: int, splits: bool) -> None:
        prompt, handle, driver = (
            random_prompt(20)[:shared] + own,
            len(self.requests) + 1,
            self.replicas[where],
        )
        if driver.config.max_servable_tokens - len(prompt) < max_tokens:
            return
        self.num_made += 1
        handle = self.num_made
        self.requests[handle], self.place[handle] = (prompt, max_tokens, []), where
        assert driver.add(handle, prompt, max_tokens=max_tokens, prefill_only=splits) is None

    @rule(where=st.integers(0, 1), is_lost=st.sampled_from([False, False, True]))
    def passes_on(self, where: int, is_lost: bool) -> None:
        """Tell the other replica of the chunks that were computed, and of the sequences with a first token."""
        source, target = self.replicas[where], self.replicas[1 - where]
        for lent in source.lent:
            if lent.handle in self.requests and not is_lost:
                key = lent.handle, where
                prompt = [] if key in self.fetched else self.requests[lent.handle][0]
                self.fetched.add(key)
                target.add(FETCH_HANDLE + lent.handle, prompt, max_tokens=1, fetch_only=True, kv=lent.kv)
        source.lent.clear()
        self.follow_moved(where)

    def follow_moved(self, where: int) -> None:
        """Continue the sequences that left a replica by themselves."""
        source, target = self.replicas[where], self.replicas[1 - where]
        for handle in list(source.moved):
            finish, tokens = source.moved.pop(handle), source.outputs.pop(handle)
            prompt, max_tokens, before = self.requests[handle]
            self.requests[handle], self.place[handle] = (prompt, max_tokens, before + tokens), 1 - where
            target.add(handle, prompt, max_tokens=max_tokens, generated=before + tokens, kv=finish.kv)

    @rule(where=st.integers(0, 1), depth=st.integers(1, 3), steps=st.integers(1, 12))
    def run_on(self, where: int, depth: int, steps: int) -> None:
        for _ in range(steps):
            self.replicas[where].step(depth)

    @rule(where=st.integers(0, 1))
    def plan(self, where: int) -> None:
        if self.replicas[where].scheduler.num_in_flight < 3:
            self.replicas[where].plan()

    @rule(data=st.data(), brings_kv=st.sampled_from([True, True, True, False]))
    def moves(self, data: st.DataObject, brings_kv: bool) -> None:
        alive = [
            handle
            for handle, place in self.place.items()
            if handle not in {**self.replicas[place].finishes, **self.replicas[place].moved}
        ]
        if not alive:
            return
        handle = data.draw(st.sampled_from(alive))
        source, target = (self.replicas[place] for place in (self.place[handle], 1 - self.place[handle]))
        hand_off(source, handle)
        finish, tokens = source.moved.pop(handle), source.outputs.pop(handle)
        assert finish.reason is FinishReason.MOVED
        prompt, max_tokens, before = self.requests[handle]
        self.requests[handle], self.place[handle] = (
            (prompt, max_tokens, before + tokens),
            1 - self.place[handle],
        )
        kv = finish.kv if brings_kv else None
        assert target.add(handle, prompt, max_tokens=max_tokens, generated=before + tokens, kv=kv) is None

    @rule(data=st.data(), where=st.integers(0, 1), tears=st.sampled_from([False, False, True]))
    def reads(self, data: st.DataObject, where: int, tears: bool) -> None:
        peer = peer_of(self.replicas[where])
        if peer.pulls:
            self.network.tears = tears
            peer.read(data.draw(st.sampled_from(sorted(peer.pulls))))

    @rule(where=st.integers(0, 1), is_reversed=st.booleans(), num_lost=st.integers(0, 2))
    def reports_come_late(self, where: int, is_reversed: bool, num_lost: int) -> None:
        """Reorder the reports of a rank, and lose some that only renew or release a lease."""
        peer = peer_of(self.replicas[where])
        may_be_lost = {KvReportKind.RENEWED, KvReportKind.RELEASED}
        lost = [each for each in peer.reports if each.kind in may_be_lost][:num_lost]
        peer.reports = [each for each in peer.reports if each not in lost]
        if is_reversed:
            peer.reports.reverse()

    @rule(where=st.integers(0, 1), seconds=st.sampled_from([0.1, 4.0, 11.0]))
    def time_passes(self, where: int, seconds: float) -> None:
        self.replicas[where].now += seconds

    @rule(where=st.integers(0, 1), kept=st.sampled_from([KvTiers.NONE, KvTiers.ALL]))
    def ranks_fail(self, where: int, kept: KvTiers) -> None:
        self.replicas[where].lose_ranks(kept=kept)

    @rule(data=st.data())
    def aborts(self, data: st.DataObject) -> None:
        if self.requests:
            handle = data.draw(st.sampled_from(sorted(self.requests)))
            driver = self.replicas[self.place[handle]]
            if handle not in {**driver.finishes, **driver.moved}:
                driver.abort(handle)
                del self.requests[handle], self.place[handle]
                driver.outputs.pop(handle, None)

    @invariant()
    def outputs_are_prefixes_of_the_expected_ones(self) -> None:
        for handle, (prompt, max_tokens, before) in getattr(self, "requests", {}).items():
            output = before + self.replicas[self.place[handle]].outputs.get(handle, [])
            assert output == oracle(prompt, max_tokens)[: len(output)]

    def teardown(self) -> None:
        for _ in range(2):
            self.run_all()
        for handle, (prompt, max_tokens, before) in getattr(self, "requests", {}).items():
            assert before + self.replicas[self.place[handle]].outputs[handle] == oracle(prompt, max_tokens)

    def run_all(self) -> None:
        """Run both replicas until nothing is left, and pass on what leaves them."""
        for where, driver in enumerate(getattr(self, "replicas", [])):
            for _ in range(3000):
                for pull_id in list(peer_of(driver).pulls):
                    peer_of(driver).read(pull_id)
                if not driver.step(2):
                    break
                driver.now += 0.05
            assert not driver.scheduler.has_work
            self.follow_moved(where)
        for driver in getattr(self, "replicas", []):
            for _ in range(3000):  # releases of the other one's leases
                if not driver.step(2):
                    break
                driver.now += 0.05
            assert driver.scheduler.has_work or driver.scheduler.blocks.num_held_blocks == 0, (
                "blocks are held for nobody"
            )


class TwoReplicasWithStates(TwoReplicas):
    """The same with a model that keeps states."""

    @initialize(
        num_state_slots=st.sampled_from([3, 6, 12]),
        num_host_state_slots=st.sampled_from([0, 3]),
        num_host_blocks=st.sampled_from([0, 8]),
        max_num_seqs=st.integers(1, 4),
        max_num_batched_tokens=st.integers(4, 24),
        layer_windows=st.sampled_from([(0,), (0, 9, 9)]),
    )
    def start(self, **config: Any) -> None:
        self.begin(num_blocks=24, **config)


def machine_settings(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize("machine", [TwoReplicas, TwoReplicasWithStates])
def test_wandering_requests_get_the_tokens_that_they_would_have_had(machine: type[TwoReplicas]) -> None:
    run_state_machine_as_test(machine, settings=machine_settings(40))


def read_unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeKvNetwork, "__init__", lambda self: self.__dict__.update(
        peers={}, verifies=False, tears=False
    ))  # fmt: skip


def end_leases_unannounced(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Leases.end

    def end_silently(leases: Leases, generation: int, fence_step: int | None) -> None:
        end(leases, generation, fence_step)
        leases._revoked.clear()

    monkeypatch.setattr(Leases, "end", end_silently)


def lend_without_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    grant = Leases.grant

    def grant_only(leases: Leases, request_id: str, block_ids: list[int], now: float, **settings: Any) -> int:
        generation = grant(leases, request_id, block_ids, now, **settings)
        leases._pool.release(block_ids, None)
        return generation

    monkeypatch.setattr(Leases, "grant", grant_only)


def lend_a_state_without_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    lend = StateSlots.lend

    def lend_only(slots: StateSlots, digest: bytes) -> tuple[int, bool] | None:
        loan = lend(slots, digest)
        if loan is not None:
            slots._pool.release([loan[0]], None)
        return loan

    monkeypatch.setattr(StateSlots, "lend", lend_only)


def use_a_failed_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pull, "complete_state", property(lambda pull: pull.state))


def use_failed_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pull, "complete", property(lambda pull: pull.targets))


@pytest.mark.parametrize(
    ("plant", "machine"),
    [
        pytest.param(read_unverified, TwoReplicas, marks=pytest.mark.slow),
        pytest.param(end_leases_unannounced, TwoReplicas, marks=pytest.mark.slow),
        (lend_without_a_reference, TwoReplicas),
        (use_failed_blocks, TwoReplicas),
        (lend_a_state_without_a_reference, TwoReplicasWithStates),
        pytest.param(use_a_failed_state, TwoReplicasWithStates, marks=pytest.mark.slow),
    ],
)
def test_planted_faults_are_found(
    plant: Any, machine: type[TwoReplicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(machine, settings=machine_settings(200))
