"""Tokens of requests whose gateway died, for the gateway that continues them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver import Driver
from fakes import oracle, random_prompt, small_config, submit

from quire.proto.digests import content_digest
from quire.proto.sampling import SamplingParams
from quire.proto.stream import (
    Finish,
    FinishReason,
    Recall,
    RecalledOutput,
    Submit,
    best_outputs,
    decode,
    encode,
)
from quire.scheduler.core.replies.retained_outputs import RETENTION_S, KnownOutput, RetainedOutputs

PROMPT = random_prompt(6)


def recall(driver: Driver, *, now: float = 0.0, **changes: Any) -> tuple[RecalledOutput, ...]:
    """Return what the scheduler knows of the request of `run_some`; `changes` are those of the Recall."""
    message = submit(0, PROMPT, n=2, max_tokens=8, ignore_eos=True, seed=5)
    content = content_digest(message.prompt_token_ids, message.sampling, None)
    values = {"tenant": "", "request_id": message.request_id, "seed": 5, "num_outputs": 2, "content": content}
    return driver.scheduler.recall(Recall(1, **values | changes), now).outputs  # type: ignore[arg-type]


def run_some(num_steps: int = 4) -> Driver:
    driver = Driver(small_config())
    driver.add(0, PROMPT, n=2, max_tokens=8, ignore_eos=True, seed=5)
    for _ in range(num_steps):
        driver.step()
    return driver


def expected() -> list[int]:
    return oracle(PROMPT, max_tokens=8, stops=())


def test_running_request_is_recalled_with_its_tokens() -> None:
    driver = run_some()
    outputs = recall(driver)
    assert [output.index for output in outputs] == [0, 1]
    for output in outputs:
        assert output.finish.reason is FinishReason.MOVED
        assert output.token_ids.tolist() == driver.outputs[output.index]
        assert 0 < len(output.token_ids) < 8


def test_request_of_a_dead_gateway_is_recalled_and_continues_elsewhere() -> None:
    driver = run_some()
    driver.scheduler.drop_gateway(b"gateway", 0.0)
    assert not driver.scheduler.num_running
    for output in recall(driver):
        assert output.token_ids.tolist() == driver.outputs[output.index]
        resumed = Driver(small_config())
        resumed.add(
            0,
            PROMPT,
            max_tokens=8,
            ignore_eos=True,
            seed=5 + output.index,
            generated=output.token_ids.tolist(),
        )
        resumed.run()
        assert output.token_ids.tolist() + resumed.outputs[0] == expected()


def test_finished_request_is_recalled_whole_until_its_retention_ends() -> None:
    driver = run_some()
    driver.run()
    outputs = recall(driver)
    assert [output.finish.reason for output in outputs] == [FinishReason.LENGTH] * 2
    assert [output.token_ids.tolist() for output in outputs] == [expected(), expected()]
    assert recall(driver, now=RETENTION_S) == ()


def test_no_other_request_is_recalled() -> None:
    driver = run_some()
    for changes in (
        {"tenant": "other"},
        {"request_id": "other"},
        {"seed": 7},
        {"content": b"other"},
        {"num_outputs": 0},
    ):
        assert recall(driver, **changes) == ()
    assert [output.index for output in recall(driver, seed=4)] == [
        1
    ]  # of a request that would have this seed


def test_requests_with_logprobs_or_beams_are_not_kept() -> None:
    driver = Driver(small_config())
    driver.add(0, PROMPT, max_tokens=4, logprobs=0)
    driver.add(1, PROMPT, max_tokens=4, beam_width=2)
    driver.add(2, PROMPT, max_tokens=4, prompt_logprobs=0)
    driver.run()
    assert len(driver.scheduler._state.retained) == 0


def test_retained_outputs_stay_within_their_memory() -> None:
    driver = run_some()
    (sequence, *_) = driver.scheduler._state.alive.values()
    finish = Finish(0, FinishReason.LENGTH)
    token_ids = sequence.token_ids[:]
    token_ids.extend([1] * 1000)
    retained = RetainedOutputs(max_bytes=20_000)
    for now in range(100):
        retained.keep(sequence, token_ids, finish, now)
        assert 0 < retained.num_bytes <= 20_000
    assert 1 < len(retained) < 10
    retained.drop_expired(1000.0)
    assert (len(retained), retained.num_bytes) == (0, 0)
    retained.keep(sequence, token_ids * 100, finish, 0.0)  # larger than all the memory
    assert (len(retained), retained.num_bytes) == (0, 0)


def test_best_output_is_the_complete_one_or_the_longest() -> None:
    def output(index: int, num_tokens: int, reason: FinishReason) -> RecalledOutput:
        return RecalledOutput(index, np.arange(num_tokens, dtype=np.int32), Finish(0, reason))

    moved, longer = output(0, 2, FinishReason.MOVED), output(0, 3, FinishReason.MOVED)
    complete, other = output(1, 2, FinishReason.STOP), output(1, 3, FinishReason.MOVED)
    assert best_outputs([longer, moved, other, complete]) == {0: longer, 1: complete}


def test_content_is_the_same_on_both_sides_of_the_wire() -> None:
    sampling = SamplingParams(
        temperature=1, top_k=3, stop=("a",), logit_bias={3: 1}, bad_words=((7,),), allowed_token_ids=(1, 2)
    )
    message = Submit(0, "r", np.array(PROMPT, np.int32), sampling)
    received = decode(encode(message))
    assert isinstance(received, Submit)
    digest = content_digest(message.prompt_token_ids, sampling, None)
    assert digest == content_digest(received.prompt_token_ids, received.sampling, None)
    assert digest != content_digest(message.prompt_token_ids, SamplingParams(temperature=0.5), None)


def test_recall_looks_at_no_other_requests_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(small_config())
    for handle in range(30):
        driver.add(handle, PROMPT, max_tokens=2, ignore_eos=True)
        driver.run()
    for handle in range(30, 40):
        driver.add(handle, PROMPT, max_tokens=2, ignore_eos=True)
    num_asked, answer = 0, KnownOutput.answer

    def count(output: KnownOutput, recall: Recall) -> RecalledOutput | None:
        nonlocal num_asked
        num_asked += 1
        return answer(output, recall)

    monkeypatch.setattr(KnownOutput, "answer", count)
    for handle in (7, 33):
        name = submit(handle, PROMPT, max_tokens=2, ignore_eos=True).request_id
        recall(driver, request_id=name, num_outputs=1, seed=0)
    assert num_asked == 2
