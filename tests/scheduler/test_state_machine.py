"""The scheduler against every order of events that hypothesis can think of.

Arrivals, aborts, planning and results interleave freely, up to three steps in flight, in pools too small for all.
The fake ranks check each read of the KV cache, `check_integrity` recounts every block after each event, and every
answer must be what its prompt gets when it runs alone.
"""

from __future__ import annotations

from driver import Driver
from fakes import VOCAB_SIZE, oracle, small_config
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

HEADS = [[(7 * head + index) % (VOCAB_SIZE - 2) + 2 for index in range(24)] for head in range(3)]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(8, 24),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        prefix_caching=st.booleans(),
    )
    def start(self, num_blocks: int, max_num_seqs: int, budget: int, prefix_caching: bool) -> None:
        self.driver = Driver(
            small_config(
                num_blocks=num_blocks,
                max_model_len=40,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                prefix_caching=prefix_caching,
            )
        )
        self.expected: dict[int, list[int]] = {}
        self.aborted: set[int] = set()

    @rule(
        head=st.sampled_from(HEADS),
        shared=st.integers(0, 20),
        own=st.lists(st.integers(2, VOCAB_SIZE - 1), min_size=1, max_size=6),
        max_tokens=st.integers(1, 24),
    )
    def arrive(self, head: list[int], shared: int, own: list[int], max_tokens: int) -> None:
        prompt = head[:shared] + own
        handle = len(self.expected)
        room = self.driver.config.max_servable_tokens - len(prompt)
        refusal = self.driver.add(handle, prompt, max_tokens=max_tokens)
        assert (refusal is not None) == (room < 1)
        self.expected[handle] = [] if refusal else oracle(prompt, min(max_tokens, room))

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(self.running()))
        assert self.driver.abort(handle)
        self.aborted.add(handle)

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

    def running(self) -> list[int]:
        return [h for h in self.expected if h not in self.driver.finishes and h not in self.aborted]

    @invariant()
    def answers_are_beginnings_of_the_expected_ones(self) -> None:
        for handle, expected in getattr(self, "expected", {}).items():
            answer = self.driver.answers[handle]
            assert answer == expected[: len(answer)]

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        while self.driver.scheduler.num_in_flight:
            self.driver.take_result()
        self.driver.run()
        for handle, expected in self.expected.items():
            if handle not in self.aborted:
                assert self.driver.answers[handle] == expected
                assert handle in self.driver.finishes
        assert self.driver.scheduler.blocks.num_held_blocks == 0


SchedulerMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestSchedulerMachine = SchedulerMachine.TestCase
