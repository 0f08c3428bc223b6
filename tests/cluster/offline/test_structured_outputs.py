"""Structured outputs of LLM: forms, forks, preemption, prefix cache, the end of reasoning, repetitions."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from benchmarks.draft_lengths import fixed_lengths
from quire import LLM, RepetitionDetectionParams, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.proto.block_tables import IntArray
from quire.proto.errors import InvalidRequest, RankFailed
from quire.proto.step import StepPlan
from quire.scheduler.speculation.jump_forward import JumpForward
from quire.worker.rank.runner import ModelRunner
from quire.worker.rank.step_executor import LaunchedStep
from quire.worker.speculation.speculator import NgramProposer
from quire.worker.structured.compilation import GrammarLibrary
from quire.worker.structured.grammar import GrammarSpec
from quire.worker.structured.guidance_backend import GuidanceMatcher

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "ages": {"type": "array", "items": {"type": "integer", "multipleOf": 3}, "maxItems": 3},
        "kind": {"enum": ["whale", "ship", None]},
    },
    "required": ["name", "ages", "kind"],
    "additionalProperties": False,
}
PROMPTS = ["It was", "Call me", "The sea"]
OPTIONS: dict[str, Any] = {"device": "cpu", "block_size": 4, "max_num_seqs": 12, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **OPTIONS) as opened:
        yield opened


def sampled(form: StructuredOutputsParams, **settings: Any) -> SamplingParams:
    settings = {"max_tokens": 120, "temperature": 1.0, "seed": 3, **settings}
    return SamplingParams(structured_outputs=form, **settings)


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [completion.text for output in outputs for completion in output.outputs]


def finished(outputs: list[RequestOutput]) -> list[str]:
    return [each.text for output in outputs for each in output.outputs if each.finish_reason == "stop"]


def test_finished_json_is_valid(llm: LLM) -> None:
    form = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    outputs = llm.generate(PROMPTS, sampled(form, n=3))
    ends = finished(outputs)
    assert len(ends) >= 5
    for text in ends:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(ends)) > 1


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (StructuredOutputsParams(choice=["red", "green", "blue"]), "red|green|blue"),
        (StructuredOutputsParams(regex=r"[a-c]{2}-\d+\."), r"[a-c]{2}-\d+\."),
        (StructuredOutputsParams(grammar='root ::= "(" root ")" | "x"'), r"\(*x\)*"),
        (StructuredOutputsParams(json=json.dumps({"const": "a b"})), '"a b"'),
    ],
)
def test_finished_output_has_its_form(llm: LLM, form: StructuredOutputsParams, pattern: str) -> None:
    ends = finished(llm.generate(PROMPTS, sampled(form)))
    assert len(ends) >= 2
    for text in ends:
        assert re.fullmatch(pattern, text), text


def test_prompts_of_one_call_share_a_compiled_form(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[GrammarSpec] = []
    compile_one = GrammarLibrary.compile

    def count(library: GrammarLibrary, spec: GrammarSpec, backend: str) -> bytes:
        compiled.append(spec)
        return compile_one(library, spec, backend)

    monkeypatch.setattr(GrammarLibrary, "compile", count)
    forms = [StructuredOutputsParams(regex=text) for text in ("[a-e]{3}", "[a-e]{3}", "[f-h]{3}")]
    made = texts(llm.generate(PROMPTS, [sampled(form) for form in forms]))
    assert [len(text) for text in made] == [3, 3, 3]
    assert set(made[2]) <= set("fgh")
    assert [spec.text for spec in compiled] == ["[a-e]{3}", "[f-h]{3}"]


def test_rows_without_a_constraint_are_unchanged_beside_others(llm: LLM) -> None:
    plain = SamplingParams(temperature=0.7, seed=9, max_tokens=16)
    alone = texts(llm.generate([PROMPTS[0]], plain))
    mixed = llm.generate(
        PROMPTS,
        [
            plain,
            sampled(StructuredOutputsParams(choice=["red"])),
            sampled(StructuredOutputsParams(regex="a+")),
        ],
    )
    assert texts(mixed)[0] == alone[0]
    assert texts(mixed)[1] == "red"


def test_preempted_output_is_the_same(llm: LLM) -> None:
    form = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    settings = sampled(form, n=3, max_tokens=60)
    whole = texts(llm.generate(PROMPTS, settings))
    with LLM("demo", num_kv_blocks=40, **OPTIONS) as small:
        assert texts(small.generate(PROMPTS, settings)) == whole
        assert small._engine.scheduler.stats.num_preemptions > 0  # type: ignore[attr-defined]


def test_output_is_the_same_with_a_cached_prompt(llm: LLM) -> None:
    form = StructuredOutputsParams(json=SCHEMA)
    prompt = "There is no folly of the beast of the earth which is not infinitely outdone"
    first, second = (llm.generate([prompt], sampled(form)) for _ in range(2))
    assert texts(first) == texts(second)
    assert second[0].num_cached_tokens


def test_min_tokens_do_not_lengthen_a_form(llm: LLM) -> None:
    form = StructuredOutputsParams(choice=["red"])
    (output,) = llm.generate(["It was"], sampled(form, min_tokens=20)).pop().outputs
    assert (output.text, output.finish_reason) == ("red", "stop")
    form = StructuredOutputsParams(regex="a*")
    (output,) = llm.generate(["It was"], sampled(form, min_tokens=7, logit_bias={0: 50})).pop().outputs
    assert len(output.token_ids) == 8


def test_constraint_that_no_backend_supports_is_refused_by_keyword(llm: LLM) -> None:
    form = StructuredOutputsParams(json={"type": "array", "uniqueItems": True})
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.json: is not supported.*uniqueItems"):
        llm.generate(["It was"], sampled(form))


def test_named_backend_is_the_only_one() -> None:
    with LLM("demo", structured_outputs_backend="xgrammar", **OPTIONS) as llm:
        form = StructuredOutputsParams(json={"type": "integer", "multipleOf": 3})
        with pytest.raises(InvalidRequest, match="multipleOf"):
            llm.generate(["It was"], sampled(form))


def test_repetition_ends_the_output_with_its_reason(llm: LLM) -> None:
    loop = StructuredOutputsParams(regex="(ab ){50}")
    settings = replace(sampled(loop), repetition_detection=RepetitionDetectionParams(8, 0, 4))
    (output,) = llm.generate(["It was"], settings).pop().outputs
    assert output.finish_reason == "repetition"
    assert output.text.startswith("ab ab ab ab")
    assert len(output.text) < 50


class TestReasoning:
    """A chat whose prompt leaves the model in its reasoning."""

    @pytest.fixture(scope="class")
    def llm(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
        template = tmp_path_factory.mktemp("chat") / "template.jinja"
        template.write_text("{{ messages[0].content }}<think>")
        with LLM("demo", chat_template=str(template), reasoning_parser="qwen3", **OPTIONS) as opened:
            yield opened

    def test_form_begins_after_the_reasoning(self, llm: LLM) -> None:
        form = StructuredOutputsParams(choice=["red", "green"])
        settings = sampled(form, thinking_token_budget=5)
        (output,) = llm.chat([{"role": "user", "content": "It was"}], settings).pop().outputs
        assert output.message is not None
        assert output.message.content in ("red", "green")
        assert output.message.reasoning_content
        assert output.finish_reason == "stop"

    def test_budget_ends_the_reasoning_without_a_form(self, llm: LLM) -> None:
        settings = SamplingParams(
            max_tokens=40, temperature=1.0, seed=1, thinking_token_budget=6, ignore_eos=True
        )
        (output,) = llm.chat([{"role": "user", "content": "It was"}], settings).pop().outputs
        assert output.message is not None
        num_reasoning = len(llm.get_tokenizer().encode(output.message.reasoning_content))
        assert 1 <= num_reasoning <= 7
        assert output.message.content

    @pytest.mark.parametrize("as_ids", [False, True])
    def test_budget_ends_the_reasoning_of_a_prompt(self, llm: LLM, as_ids: bool) -> None:
        encode = llm.get_tokenizer().encode
        prompt = encode("It was<think>") if as_ids else "It was<think>"
        settings = SamplingParams(max_tokens=20, temperature=0.0, thinking_token_budget=3)
        (output,) = llm.generate([prompt], settings).pop().outputs
        closing = encode("</think>")
        assert list(output.token_ids[3 : 3 + len(closing)]) == closing


@pytest.mark.parametrize("prompt", ["It was", [5, 6]])
def test_budget_of_a_model_that_does_not_reason_is_refused(llm: LLM, prompt: str | list[int]) -> None:
    settings = SamplingParams(max_tokens=4, thinking_token_budget=3)
    with pytest.raises(InvalidRequest, match=r"thinking_token_budget.*not known to reason"):
        llm.generate([prompt], settings)
    settings = SamplingParams(max_tokens=4, thinking_token_budget=-1)
    assert texts(llm.generate([prompt], settings))


def test_form_that_fails_ends_its_request_with_the_reason(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    form = StructuredOutputsParams(regex="[a-z ]{30,}")
    expected = texts(llm.generate(PROMPTS[:1], sampled(form)))
    fill_masks, num_masks = GuidanceMatcher.fill_masks, itertools.count()

    def failing(matchers: list[GuidanceMatcher], words: IntArray, places: list[int]) -> None:
        if next(num_masks) >= 7:
            raise ValueError
        fill_masks(matchers, words, places)

    def failing_alone(matcher: GuidanceMatcher, words: IntArray) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(GuidanceMatcher, "fill_masks", failing)
    monkeypatch.setattr(GuidanceMatcher, "fill_mask", failing_alone)
    with pytest.raises(InvalidRequest, match=r"structured_outputs.*planted"):
        llm.generate(PROMPTS[:1], sampled(form))
    monkeypatch.undo()
    assert texts(llm.generate(PROMPTS[:1], sampled(form))) == expected


def test_drafted_tokens_leave_the_output_the_same(llm: LLM) -> None:
    form = StructuredOutputsParams(json=SCHEMA)
    settings = [sampled(form, seed=seed) for seed in range(3)]
    loop, guard = StructuredOutputsParams(regex="(ab ){30}"), RepetitionDetectionParams(8, 0, 9)
    settings.append(sampled(loop, repetition_detection=guard))
    prompts = [*PROMPTS, "It was"]
    whole = llm.generate(prompts, settings)
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    with fixed_lengths(4), LLM("demo", speculative_config=drafts, **OPTIONS) as speculating:
        outputs = speculating.generate(prompts, settings)
        stats = speculating._engine.scheduler.stats  # type: ignore[attr-defined]
    assert texts(outputs) == texts(whole)
    assert outputs[3].outputs[0].finish_reason == whole[3].outputs[0].finish_reason == "repetition"
    assert sum(stats.num_accepted) > 10


ORDERS = "To the masthead, all of you, and keep a sharp lookout for the white whale!"
FORCED = [
    StructuredOutputsParams(json={"const": {"orders": ORDERS}}, disable_any_whitespace=True),
    StructuredOutputsParams(
        structural_tag={
            "type": "structural_tag",
            "format": {
                "type": "tag",
                "begin": "<orders>",
                "content": {"type": "const_string", "value": ORDERS},
                "end": "</orders>",
            },
        }
    ),
]


@pytest.mark.parametrize("backend", ["guidance", "xgrammar"])
def test_jump_forward_takes_fewer_steps(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """No other drafts are made. xgrammar allows any spelling of the text, so that some of these are rejected."""
    monkeypatch.setattr(NgramProposer, "propose", lambda proposer, rows, max_lens: np.zeros_like(rows))
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    options: dict[str, Any] = {"structured_outputs_backend": backend, **OPTIONS}
    with fixed_lengths(4), LLM("demo", speculative_config=drafts, **options) as llm:
        stats = llm._engine.scheduler.stats  # type: ignore[attr-defined]
        for form in FORCED:
            num_steps_before = stats.num_steps
            (output,) = llm.generate(PROMPTS[:1], sampled(form, temperature=0.0)).pop().outputs
            assert ORDERS in output.text
            assert stats.num_steps - num_steps_before < 2 / 3 * len(output.token_ids)


def _no_room(forced: JumpForward, rows: Any, limits: Any, most: int, step_id: int) -> None:
    return None


@pytest.mark.parametrize("backend", ["guidance", "xgrammar"])
def test_jump_forward_takes_fewer_steps_without_other_drafts(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(
        JumpForward, "observe_step", lambda *args, **kwargs: None
    )  # which depends on the load
    settings = [sampled(FORCED[0], temperature=0.0, n=2), sampled(FORCED[1])]
    with LLM("demo", structured_outputs_backend=backend, **OPTIONS) as llm:
        stats = llm._engine.scheduler.stats  # type: ignore[attr-defined]
        counts, made = [], []
        for choose in (JumpForward.choose, _no_room):
            monkeypatch.setattr(JumpForward, "choose", choose)
            num_steps_before = stats.num_steps
            made.append([texts(llm.generate(PROMPTS[:1], each)) for each in settings])
            counts.append(stats.num_steps - num_steps_before)
    assert made[0] == made[1]
    assert counts[0] < 2 / 3 * counts[1]


def test_only_row_of_an_engine_has_room_for_jump_forward(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        JumpForward, "observe_step", lambda *args, **kwargs: None
    )  # which depends on the load
    prompts, params = [*PROMPTS[:1], "It was"], sampled(FORCED[0], temperature=0.0)
    with LLM("demo", **(OPTIONS | {"max_num_seqs": 1})) as single:
        outputs = single.generate(prompts, params)
        stats = single._engine.scheduler.stats  # type: ignore[attr-defined]
    assert texts(outputs) == texts(llm.generate(prompts, params))
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert sum(stats.num_accepted) > num_tokens / 3


def test_steps_that_fail_amid_drafts_leave_the_output_the_same(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recovered rank has neither the drafted tokens nor the state of the grammar."""
    settings = [sampled(StructuredOutputsParams(json=SCHEMA), seed=seed) for seed in range(3)]
    whole = texts(llm.generate(PROMPTS, settings))
    launch, num_drafting = ModelRunner.launch, itertools.count()

    def fail_sometimes(runner: ModelRunner, plan: StepPlan) -> LaunchedStep:
        if plan.draft_lens.size and plan.draft_lens.any() and next(num_drafting) in (2, 9):
            raise RankFailed(0, "RuntimeError: on command", plan.step_id, is_step_error=True)
        return launch(runner, plan)

    monkeypatch.setattr(ModelRunner, "launch", fail_sometimes)
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    with fixed_lengths(4), LLM("demo", speculative_config=drafts, **OPTIONS) as speculating:
        outputs = speculating.generate(PROMPTS, settings)
    assert next(num_drafting) > 10
    assert texts(outputs) == whole
