"""The waiting work before a new request."""

from __future__ import annotations

from array import array

import pytest

from quire.proto.sampling import SamplingParams
from quire.scheduler.core.queue.backlog import Job
from quire.scheduler.core.queue.pace import Pace
from quire.scheduler.core.queue.waiting import WaitingQueue
from quire.scheduler.sequences.sequence import Sequence


def waiting(
    number: int, num_prompt_tokens: int = 10, *, tenant: str = "", priority: int = 0, has_run: bool = False
) -> Sequence:
    return Sequence(
        seq_id=number, arrival=number, gateway=b"", handle=number, request_id="", sampling=SamplingParams(),
        seed=0, num_prompt_tokens=num_prompt_tokens, max_len=num_prompt_tokens + 99,
        token_ids=array("i", [0] * num_prompt_tokens), eos_token_ids=(1,), arrived_at=0.0, tenant=tenant,
        rank=-priority, has_run=has_run,
    )  # fmt: skip


def queue(policy: str, *sequences: Sequence, weights: tuple[tuple[str, float], ...] = ()) -> WaitingQueue:
    pace = Pace()
    pace.observe_output(5, has_stopped=True)
    made = WaitingQueue(policy, lambda sequence: 0, weights, pace)
    for sequence in sequences:
        made.push(sequence)
    return made


def num_before(made: WaitingQueue, **job: object) -> float:
    fields: dict[str, object] = {"num_sequences": 1, "num_prompt_tokens": 10, "row_steps": 5.0}
    return made.backlog.before(Job(**(fields | job))).num_sequences  # type: ignore[arg-type]


def test_everything_that_waits_goes_before_a_new_request() -> None:
    made = queue("fcfs", waiting(1), waiting(2, 30))
    work = made.backlog.before(Job(1, 10, 5.0))
    assert (work.num_sequences, work.row_steps, work.num_prompt_tokens) == (2, 10.0, 40)


def test_lower_priorities_do_not_go_before_a_request() -> None:
    made = queue("priority", waiting(1, priority=1), waiting(2, priority=3), waiting(3, priority=5))
    assert [num_before(made, rank=-priority) for priority in (0, 3, 4, 9)] == [3, 2, 1, 0]


def test_longer_prompts_do_not_go_before_a_short_one() -> None:
    made = queue("shortest-prefill", waiting(1, 4), waiting(2, 100), waiting(3, 1000))
    assert [num_before(made, num_prompt_tokens=tokens) for tokens in (5, 120, 5000)] == [1, 2, 3]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest-prefill", "fair", "longest-prefix"])
def test_sequences_that_ran_go_before_all(policy: str) -> None:
    made = queue(policy, waiting(1, 1000, priority=-9, tenant="other", has_run=True))
    assert num_before(made, rank=-9, num_prompt_tokens=1) == 1


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest-prefill", "fair", "longest-prefix"])
def test_removed_sequences_leave_nothing(policy: str) -> None:
    sequences = [
        waiting(number, number, tenant=f"t{number % 3}", priority=number % 2) for number in range(1, 20)
    ]
    made = queue(policy, *sequences)
    for sequence in sequences:
        made.remove(sequence)
    assert num_before(made, tenant="t1", num_prompt_tokens=9999, rank=1) == 0
    assert not made.backlog._classes
    assert not made.backlog._jobs


def test_tenant_waits_only_until_the_others_have_had_as_much() -> None:
    crowd = [waiting(number, tenant="greedy") for number in range(1, 101)]
    made = queue("fair", *crowd)
    assert num_before(made, tenant="greedy") == 100
    assert num_before(made, tenant="light") == 0
    made.push(waiting(200, tenant="light"))
    assert num_before(made, tenant="light") == pytest.approx(2)  # its own, and one of the other tenant


def test_heavier_tenant_waits_for_less_of_the_others() -> None:
    crowd = [waiting(number, tenant="greedy") for number in range(1, 101)]
    made = queue("fair", *crowd, waiting(200, tenant="gold"), weights=(("gold", 2.0),))
    assert num_before(made, tenant="gold") == pytest.approx(1.5)


def test_tenant_with_most_work_makes_room_for_the_others() -> None:
    crowd = [waiting(number, tenant="greedy") for number in range(1, 11)]
    made = queue("fair", *crowd, waiting(20, tenant="light"))
    assert made.crowding_sequence("light") is crowd[-1]
    assert made.crowding_sequence("new") is crowd[-1]
    assert made.crowding_sequence("greedy") is None
    assert queue("fcfs", *crowd).crowding_sequence("light") is None
    assert queue("fair").crowding_sequence("light") is None
