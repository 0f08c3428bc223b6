"""Every sampling parameter end to end in one process, compared with transformers."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from narrowing import not_none
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from quire.cluster.text.requests.outputs import RequestOutput
from quire.proto.errors import InvalidRequest

PROMPTS = [
    "The quick brown fox jumps over the lazy dog",
    "It was the best of times, it was",
    "A gathering of folded pages is called a quire; many quires make a book.",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, max_tokens=24, ignore_eos=True, seed=11)
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.4, "frequency_penalty": 0.8, "presence_penalty": 0.3}


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


def tokens_of(results: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for result in results for output in result.outputs]


def test_constrained_greedy_tokens_equal_transformers(llm: LLM, reference: Any) -> None:
    """All requests are in one batch, each with its own constraints."""
    plain = llm.generate(PROMPTS, GREEDY)
    first, second, third = tokens_of(plain)
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        (
            {"logit_bias": {second[0]: -20.0, 7: 3.0}},
            {"sequence_bias": [[[second[0]], -20.0], [[7], 3.0]]},
        ),
        (
            {"bad_words": [tuple(third[2:5]), (third[0],)], "repetition_penalty": 1.1},
            {"bad_words_ids": [third[2:5], third[:1]], "repetition_penalty": 1.1},
        ),
        (
            {"allowed_token_ids": list(range(60, 200, 3))},
            {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(60, 200, 3))},
        ),
    ]
    prompts = [*PROMPTS, PROMPTS[0]]
    results = llm.generate(prompts, [replace(GREEDY, **ours) for ours, _ in cases])
    for result, (_, theirs), before in zip(results, cases, [first, second, third, first], strict=True):
        ids = torch.tensor([result.prompt_token_ids])
        whole = reference.generate(ids, max_new_tokens=24, do_sample=False, **theirs)
        assert result.outputs[0].token_ids == whole[0, ids.shape[1] :].tolist()
        assert result.outputs[0].token_ids != before


def test_constraints_hold_in_batches_after_preemption_and_for_each_completion(
    llm: LLM, model_dir: Path
) -> None:
    params = [
        replace(SAMPLED, n=2, **PENALTIES),
        replace(SAMPLED, bad_words=("e", "the"), presence_penalty=1.0),
        replace(
            SAMPLED,
            top_p=0.9,
            logit_bias={5: 4.0},
            allowed_token_ids=tuple(range(300)),
            frequency_penalty=2.0,
        ),
    ]
    alone = [
        tokens_of(llm.generate(prompt, sampling)) for prompt, sampling in zip(PROMPTS, params, strict=True)
    ]
    together = llm.generate([*PROMPTS, PROMPTS[0]], [*params, SAMPLED])
    assert tokens_of(together)[:-1] == [*chain(*alone)]
    assert tokens_of(together)[-1:] == tokens_of(llm.generate(PROMPTS[0], SAMPLED))
    with LLM(str(model_dir), device="cpu", block_size=4, num_kv_blocks=26, max_num_seqs=8) as small:
        assert tokens_of(small.generate(PROMPTS, params)) == [*chain(*alone)]
        assert small._engine.scheduler.stats.num_preemptions > 0  # type: ignore[attr-defined]


def has(token_ids: list[int], spelling: tuple[int, ...]) -> bool:
    """Return whether the tokens contain the spelling."""
    positions = range(len(token_ids) - len(spelling) + 1)
    return any(tuple(token_ids[position : position + len(spelling)]) == spelling for position in positions)


def test_bad_words_are_not_generated(llm: LLM) -> None:
    """Words of one or several tokens, with and without a space before them."""
    tokenizer, free = llm._tokenizer, llm.generate(PROMPTS, SAMPLED)
    texts = (tokenizer.token_text(token_id) for tokens in tokens_of(free) for token_id in tokens)
    words = {text.strip() for text in texts if text.strip().isalpha() and text.isascii()}
    forbidden = {spelling for word in words for spelling in tokenizer.word_token_ids(word)}
    assert any(has(tokens, spelling) for tokens in tokens_of(free) for spelling in forbidden)
    assert any(len(spelling) > 1 for spelling in forbidden)
    params = replace(SAMPLED, bad_words=tuple(sorted(words)))
    for tokens in tokens_of(llm.generate(PROMPTS, params)):
        assert len(tokens) == 24
        assert not any(has(tokens, spelling) for spelling in forbidden)


def expected_logprobs(reference: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([token_ids])).logits[0].log_softmax(dim=-1)


def assert_prompt_logprobs(result: RequestOutput, reference: Any, num_top: int) -> None:
    token_ids, entries = not_none(result.prompt_token_ids), result.prompt_logprobs
    assert entries is not None
    assert entries[0] is None
    logprobs = expected_logprobs(reference, token_ids)
    for position, entry in enumerate(entries[1:], start=1):
        assert entry is not None
        row = logprobs[position - 1]
        top = row.topk(num_top).indices.tolist()
        assert set(entry) == {token_ids[position], *top}
        for token_id, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert [entry[token_id].rank for token_id in top] == list(range(1, num_top + 1))


def test_prompt_logprobs_do_not_depend_on_the_prefix_cache(llm: LLM, reference: Any) -> None:
    """Prompts that are in the prefix cache, in chunks of 16 tokens per step, beside other requests."""
    llm.generate(PROMPTS, GREEDY)
    asked = [replace(GREEDY, prompt_logprobs=num_top, n=n) for num_top, n in ((0, 1), (4, 2), (2, 1))]
    results = llm.generate([*PROMPTS, PROMPTS[2]], [*asked, GREEDY])
    for result, params in zip(results, asked, strict=False):
        assert_prompt_logprobs(result, reference, params.prompt_logprobs or 0)
    assert results[3].prompt_logprobs is None
    assert tokens_of(results)[-1] == tokens_of(llm.generate(PROMPTS[2], GREEDY))[0]
    (single,) = llm.generate([[7]], replace(GREEDY, prompt_logprobs=3))
    assert single.prompt_logprobs == [None]
    ranked = llm.generate(PROMPTS[0], replace(SAMPLED, n=1, best_of=3, prompt_logprobs=1))
    beams = llm.generate(PROMPTS[0], SamplingParams(beam_width=3, max_tokens=5, prompt_logprobs=1))
    for (result,) in (ranked, beams):
        assert_prompt_logprobs(result, reference, 1)


def test_prompt_logprobs_of_preempted_prompts(model_dir: Path, reference: Any) -> None:
    with LLM(
        str(model_dir), device="cpu", block_size=4, num_kv_blocks=24, max_num_seqs=4, max_num_batched_tokens=8
    ) as small:
        results = small.generate(PROMPTS, replace(GREEDY, prompt_logprobs=2, max_tokens=40))
        assert small._engine.scheduler.stats.num_preemptions > 0  # type: ignore[attr-defined]
    for result in results:
        assert_prompt_logprobs(result, reference, 2)


def test_truncate_prompt_tokens_keeps_the_end_of_the_prompt(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[2], GREEDY)
    (cut,) = llm.generate(PROMPTS[2], replace(GREEDY, truncate_prompt_tokens=9))
    assert not_none(cut.prompt_token_ids) == not_none(whole.prompt_token_ids)[-9:]
    assert tokens_of([cut]) == tokens_of(llm.generate(not_none(whole.prompt_token_ids)[-9:], GREEDY))
    (short,) = llm.generate("It was", replace(GREEDY, truncate_prompt_tokens=9))
    assert short.prompt_token_ids == llm.generate("It was", GREEDY)[0].prompt_token_ids


def test_include_stop_str_in_output_keeps_the_stop(llm: LLM) -> None:
    (plain,) = llm.generate(PROMPTS[0], SAMPLED)
    text, token_ids = plain.outputs[0].text, plain.outputs[0].token_ids
    stop = text[5:8]
    for keep in (False, True):
        (result,) = llm.generate(PROMPTS[0], replace(SAMPLED, stop=(stop,), include_stop_str_in_output=keep))
        assert result.outputs[0].text == text[: text.find(stop) + len(stop) * keep]
        assert result.outputs[0].stop_reason == stop
    silent, spoken = (
        llm.generate(
            PROMPTS[0], replace(SAMPLED, stop_token_ids=(token_ids[6],), include_stop_str_in_output=keep)
        )[0].outputs[0]
        for keep in (False, True)
    )
    assert silent.token_ids == spoken.token_ids
    assert spoken.text != silent.text
    assert spoken.text.startswith(silent.text)


def test_special_tokens_are_in_the_text_if_requested(llm: LLM) -> None:
    (end,) = llm.config.model.eos_token_ids
    forced = replace(GREEDY, allowed_token_ids=(end,), max_tokens=2)
    (hidden,) = llm.generate(PROMPTS[0], forced)
    (shown,) = llm.generate(PROMPTS[0], replace(forced, skip_special_tokens=False))
    assert hidden.outputs[0].token_ids == shown.outputs[0].token_ids == [end, end]
    assert hidden.outputs[0].text == ""
    assert shown.outputs[0].text == "<|endoftext|>" * 2


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"logit_bias": {9999: 1.0}}, "sampling.logit_bias[0]"),
        ({"allowed_token_ids": [3, 9999]}, "sampling.allowed_token_ids[1]"),
        ({"bad_words": ["fine", (1, 9999)]}, "sampling.bad_words[1][1]"),
        ({"bad_words": ["a\ud800"]}, "sampling.bad_words[0]"),
    ],
)
def test_token_outside_the_vocabulary_is_refused(llm: LLM, asked: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(PROMPTS[0], replace(GREEDY, **asked))
    assert caught.value.field == field


def test_tenant_and_salt_reach_the_scheduler(llm: LLM) -> None:
    prompt: Any = np.arange(40)
    (first,) = llm.generate(prompt, replace(GREEDY, max_tokens=1), cache_salt="mine", tenant="gold")
    hits = llm._engine.scheduler.blocks  # type: ignore[attr-defined]
    before = hits.num_hit_tokens
    llm.generate([prompt], replace(GREEDY, max_tokens=1), cache_salt=["yours"], tenant=["tin"])
    assert hits.num_hit_tokens == before
    llm.generate(prompt, replace(GREEDY, max_tokens=1), cache_salt="mine", tenant="tin")
    assert hits.num_hit_tokens == before
    llm.generate(prompt, replace(GREEDY, max_tokens=1), cache_salt="mine", tenant="gold")
    assert hits.num_hit_tokens >= before + 36
    with pytest.raises(InvalidRequest, match="tenant"):
        llm.generate([prompt], GREEDY, tenant=["a", "b"])
    assert first.outputs[0].finish_reason == "length"
