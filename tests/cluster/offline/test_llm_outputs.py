"""Several completions per prompt, best_of, preemption and priority."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire import LLM, CompletionOutput, SamplingParams
from quire.cluster.offline.engine import OutputCollector
from quire.cluster.text.requests.sequence_update import SequenceUpdate
from quire.proto.errors import InvalidRequest

PROMPT = "A gathering of folded pages is called a quire"
SAMPLED = SamplingParams(max_tokens=20, temperature=0.8, seed=7, ignore_eos=True)


def ask(llm: LLM, params: SamplingParams, prompt: str = PROMPT) -> list[CompletionOutput]:
    (result,) = llm.generate(prompt, params)
    return result.outputs


def test_completion_i_equals_a_request_with_seed_plus_i(llm: LLM) -> None:
    together = ask(llm, replace(SAMPLED, n=4))
    alone = [ask(llm, replace(SAMPLED, seed=7 + index))[0] for index in range(4)]
    assert [output.index for output in together] == [0, 1, 2, 3]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert [output.text for output in together] == [output.text for output in alone]
    assert len({tuple(output.token_ids) for output in together}) == 4


def test_more_completions_than_batch_slots(llm: LLM) -> None:
    several = llm.generate([PROMPT, "It was"], replace(SAMPLED, n=9))
    assert [[output.index for output in result.outputs] for result in several] == [list(range(9))] * 2
    assert [output.token_ids for output in several[0].outputs[:4]] == [
        output.token_ids for output in ask(llm, replace(SAMPLED, n=4))
    ]


def test_updates_are_processed_at_ends_unless_stop_strings_are_sought(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    lens: list[int] = []
    process = OutputCollector.on_update

    def on_update(collector: OutputCollector, index: int, update: SequenceUpdate) -> None:
        lens.append(len(update.token_ids))
        process(collector, index, update)

    monkeypatch.setattr(OutputCollector, "on_update", on_update)
    plain = ask(llm, SAMPLED)
    assert lens == [20]
    lens.clear()
    sought = ask(llm, replace(SAMPLED, stop=("never in the text",)))
    assert (sought[0].text, sought[0].token_ids) == (plain[0].text, plain[0].token_ids)
    assert lens == [1] * 20


def test_stop_string_ends_only_its_completion(llm: LLM) -> None:
    whole = ask(llm, replace(SAMPLED, n=3))
    stop = whole[1].text[6:12]
    assert stop not in whole[0].text + whole[2].text
    cut = ask(llm, replace(SAMPLED, n=3, stop=(stop,)))
    assert cut[1].text == whole[1].text[: whole[1].text.find(stop)]
    assert (cut[1].finish_reason, cut[1].stop_reason) == ("stop", stop)
    for index in (0, 2):
        assert (cut[index].token_ids, cut[index].finish_reason) == (whole[index].token_ids, "length")


def test_cumulative_logprob_is_the_sum_of_logprobs(llm: LLM) -> None:
    assert all(output.cumulative_logprob is None for output in ask(llm, replace(SAMPLED, n=2)))
    for output in ask(llm, replace(SAMPLED, n=2, logprobs=1)):
        assert output.logprobs is not None
        chosen = (
            entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)
        )
        assert output.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-4)


def test_best_of_returns_the_most_likely_completions(llm: LLM) -> None:
    every = ask(llm, replace(SAMPLED, n=5, logprobs=0))
    ranked = sorted(every, key=lambda output: -(output.cumulative_logprob or 0.0))
    assert ranked != every
    for n in (1, 2, 5):
        best = ask(llm, replace(SAMPLED, n=n, best_of=5))
        assert [output.index for output in best] == list(range(n))
        assert [output.token_ids for output in best] == [output.token_ids for output in ranked[:n]]
        assert [output.text for output in best] == [output.text for output in ranked[:n]]
        assert all(output.logprobs is None for output in best)
        for output, expected in zip(best, ranked, strict=False):
            assert output.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-4)


@pytest.mark.parametrize("num_host_kv_blocks", [0, 64])
def test_preemption_does_not_change_outputs(llm: LLM, model_dir: Path, num_host_kv_blocks: int) -> None:
    prompts = [PROMPT, "It was", "The quick brown fox jumps over", PROMPT + "; many"]
    params = [
        replace(SAMPLED, max_tokens=30),
        replace(SAMPLED, n=2),
        *[replace(SAMPLED, temperature=0.0)] * 2,
    ]
    expected = llm.generate(prompts, params)
    with LLM(
        str(model_dir),
        device="cpu",
        block_size=4,
        num_kv_blocks=24,
        num_host_kv_blocks=num_host_kv_blocks,
        max_num_seqs=8,
    ) as small:
        scheduler = small._engine.scheduler  # type: ignore[attr-defined]
        scheduler._state.costs.swap_blocks_per_s = 1e9  # swap whenever there is host memory
        results = small.generate(prompts, params)
        assert scheduler.stats.num_preemptions > 0
        assert (scheduler.blocks.num_swapped_blocks > 0) == (num_host_kv_blocks > 0)
        scheduler.check_integrity()
        assert scheduler.blocks.num_held_blocks == 0
    assert [result.outputs for result in results] == [result.outputs for result in expected]


def test_lower_priority_value_is_scheduled_first(model_dir: Path) -> None:
    with LLM(str(model_dir), device="cpu", num_kv_blocks=32, max_num_seqs=1, policy="priority") as llm:
        scheduler = llm._engine.scheduler  # type: ignore[attr-defined]
        started: list[list[int]] = []
        schedule = scheduler.schedule

        def watched(now: float) -> object:
            plan = schedule(now)
            if plan is not None:
                started.extend(new.token_ids.tolist() for new in plan.new)
            return plan

        scheduler.schedule = watched
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        llm.generate([[1], [2], [3]], params, priority=[9, 5, 0])
        assert started == [[3], [2], [1]]
        with pytest.raises(InvalidRequest, match="are 2 for 3 prompts") as caught:
            llm.generate([[1], [2], [3]], params, priority=[0, 5])
        assert caught.value.field == "priority"


def test_beam_search_wider_than_the_batch_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="is 9, this replica runs at most 8 at once"):
        llm.generate(PROMPT, SamplingParams(beam_width=9))
