"""The scheduler against every order of events that hypothesis can think of.

Arrivals (single, forked, beam searches; of several tenants, salts, priorities and deadlines), aborts, planning,
results, the passing of time, failures of the whole group and drains, after which another replica goes on with what
was given back, interleave freely, up to three steps in flight, in pools too small for all. The fake ranks check each
read of the KV cache, `check_integrity` recounts every block after each event, and every answer must be what its
prompt gets when it runs alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from driver import Driver
from fakes import EOS, VOCAB_SIZE, beam_oracle, oracle, score_oracle, small_config
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from quire.proto.errors import ReplicaUnavailable
from quire.scheduler.kv.block_manager import BlockManager
from quire.scheduler.kv.block_pool import BlockPool

HEADS = [[(7 * head + index) % (VOCAB_SIZE - 2) + 2 for index in range(24)] for head in range(3)]
POLICIES = ["fcfs", "priority", "fair", "shortest-prefill", "longest-prefix"]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(8, 24),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        prefix_caching=st.booleans(),
        num_host_blocks=st.sampled_from([0, 3, 30]),
        swap_blocks_per_s=st.sampled_from([0.0, 1e12]),
        policy=st.sampled_from(POLICIES),
    )
    def start(self, budget: int, **config: Any) -> None:
        self.driver = Driver(small_config(max_model_len=40, max_num_batched_tokens=budget, **config))
        self.expected: dict[int, list[int]] = {}
        self.group_of: dict[int, range] = {}  # handles that end together
        self.scored: dict[int, list[int]] = {}  # first handle |-> the prompt whose scores it asks for
        self.excused: set[int] = set()  # aborted, late or failed: need not be complete
        self.requests: dict[int, tuple[list[int], dict[str, Any]]] = {}  # handle |-> its prompt and settings

    @rule(
        head=st.sampled_from(HEADS),
        shared=st.integers(0, 20),
        own=st.lists(st.integers(2, VOCAB_SIZE - 1), min_size=1, max_size=6),
        max_tokens=st.integers(1, 24),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        beams=st.sampled_from([None, None, None, 2, 4]),
        priority=st.integers(0, 2),
        tenant=st.sampled_from(["a", "b"]),
        salt=st.sampled_from([b"", b"", b"salt"]),
        timeout_s=st.sampled_from([None, None, None, 5.0]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def arrive(
        self,
        head: list[int],
        shared: int,
        own: list[int],
        max_tokens: int,
        n: int,
        beams: int | None,
        **rest: Any,
    ) -> None:
        prompt, handle, config = head[:shared] + own, len(self.expected), self.driver.config
        room = config.max_servable_tokens - len(prompt)
        width = None if beams is None or beams > config.scheduler.max_num_seqs else max(n, beams)
        if width is not None and width > config.scheduler.max_num_seqs:
            width = None
        settings = {"max_tokens": max_tokens, "n": n, "beam_width": width, **rest}
        self.requests |= dict.fromkeys(range(handle, handle + n), (prompt, settings))
        if rest["prompt_logprobs"] is not None:
            self.scored[handle] = prompt
        refusal = self.driver.add(handle, prompt, **settings)
        assert (refusal is not None) == (room < 1 and not self.driver.scheduler.is_draining)
        most = min(max_tokens, room)
        answers = [[]] * n if room < 1 else self._answers(prompt, most, n, width)
        for index, answer in enumerate(answers):
            self.expected[handle + index] = answer
            alone = range(handle + index, handle + index + 1)
            self.group_of[handle + index] = range(handle, handle + n) if width else alone
        if room < 1 or rest["timeout_s"] is not None:
            self.excused |= set(range(handle, handle + n))

    def _answers(self, prompt: list[int], most: int, n: int, width: int | None) -> list[list[int]]:
        if width is None:
            return [oracle(prompt, most)] * n
        return beam_oracle(prompt, most, width, n, (EOS,))

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(self.unfinished()))
        self.driver.abort(handle)
        self.excused |= set(self.group_of[handle])
        for ended in self.group_of[handle]:
            self.driver.moved.pop(ended, None)

    @precondition(lambda self: self.driver.scheduler.num_in_flight < 3)
    @rule()
    def plan(self) -> None:
        self.driver.plan()

    @precondition(lambda self: self.driver.scheduler.num_in_flight)
    @rule()
    def take_result(self) -> None:
        self.driver.take_result()

    @rule(depth=st.integers(1, 3), steps=st.integers(1, 10))
    def run_on(self, depth: int, steps: int) -> None:
        for _ in range(steps):
            self.driver.step(depth)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.driver.now += seconds

    @rule()
    def group_fails(self) -> None:
        """Every request is ended, and the plans under way are never executed."""
        self.excused |= set(self.unfinished()) - self.driver.moved.keys()
        self.driver.fail(ReplicaUnavailable("rank 1 died"))

    @rule(grace_s=st.sampled_from([0.0, 0.5, 2.0]))
    def drain(self, grace_s: float) -> None:
        self.driver.scheduler.drain(grace_s, self.driver.now)

    @precondition(lambda self: self.driver.moved and self._is_free_to_replace())
    @rule()
    def go_on_elsewhere(self) -> None:
        """What was given back goes on in another replica."""
        if self.driver.scheduler.is_draining:
            self.driver.replace()
        for handle in list(self.driver.moved):
            if handle in self.driver.moved:  # not submitted with another of its beam search just now
                self._submit_again(handle)

    def _is_free_to_replace(self) -> bool:
        scheduler = self.driver.scheduler
        return not scheduler.is_draining or not scheduler.has_work

    def _submit_again(self, handle: int) -> None:
        prompt, settings = self.requests[handle]
        if settings["beam_width"] is not None:
            first = self.group_of[handle].start
            assert not self.driver.answers[first], "a beam search was told before its end"
            self.driver.add(first, prompt, **settings)
        else:
            alone = {**settings, "n": 1}
            self.driver.add(handle, prompt, generated=self.driver.answers[handle], **alone)

    def _scores(self, handle: int) -> list[tuple[int, float]]:
        """As a gateway takes them: what comes again after a move is passed over."""
        taken: list[tuple[int, float]] = []
        for place, score in self.driver.scores.get(handle, []):
            if place == len(taken) + 1:
                taken.append((place, score))
        return taken

    def unfinished(self) -> list[int]:
        return [h for h in self.expected if h not in self.driver.finishes and h not in self.excused]

    @invariant()
    def answers_are_beginnings_of_the_expected_ones(self) -> None:
        for handle, expected in getattr(self, "expected", {}).items():
            answer = self.driver.answers[handle]
            assert answer == expected[: len(answer)]

    def teardown(self) -> None:
        if not hasattr(self, "driver") or sys.exc_info()[1] is not None:
            return  # what failed speaks for itself
        while self.driver.scheduler.num_in_flight:
            self.driver.take_result()
        self.driver.run()
        if self.driver.moved:
            self.go_on_elsewhere()
            self.driver.run()
        for handle, expected in self.expected.items():
            if handle not in self.excused:
                assert self.driver.answers[handle] == expected
                assert handle in self.driver.finishes
                assert handle not in self.scored or self._scores(handle) == score_oracle(self.scored[handle])
        blocks = self.driver.scheduler.blocks
        assert blocks.num_held_blocks == 0
        assert blocks.host is None or blocks.host.num_held == 0


def machine_settings(max_examples: int, *, derandomize: bool) -> settings:
    return settings(
        max_examples=max_examples,
        derandomize=derandomize,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def leak_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of several blocks keeps one of them when it is closed."""
    release = BlockPool.release

    def release_too_few(pool: BlockPool, block_ids: list[int], fence_step: int | None) -> None:
        release(pool, block_ids[1:] if len(block_ids) > 2 else block_ids, fence_step)

    monkeypatch.setattr(BlockPool, "release", release_too_few)


def write_a_shared_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork writes the block that it should have copied."""

    def share(blocks: BlockManager, source: int) -> int:
        blocks._pool.share([source])
        return source

    monkeypatch.setattr(BlockManager, "_copy", share)


def free_without_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are handed out again while a step in flight may touch them."""
    release = BlockPool.release
    monkeypatch.setattr(
        BlockPool, "release", lambda pool, block_ids, fence_step: release(pool, block_ids, None)
    )


@pytest.mark.parametrize("plant", [leak_a_reference, write_a_shared_block, free_without_a_fence])
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    quick = settings(machine_settings(300, derandomize=True), phases=[Phase.generate], database=None)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(SchedulerMachine, settings=quick)


class TestSchedulerMachine(SchedulerMachine.TestCase):  # type: ignore[misc, valid-type]  # made by hypothesis
    settings = machine_settings(150, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(7200)
class TestSchedulerMachineLong(SchedulerMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = machine_settings(10_000, derandomize=False)
