"""Beam search through the real worker equals that of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from narrowing import not_none

from benchmarks.draft_lengths import fixed_lengths
from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.cluster.config.engine_options import DEMO_MODEL_PATH
from quire.cluster.text.requests.grammar_compiler import grammar_spec
from quire.cluster.text.requests.outputs import CompletionOutput
from quire.proto.errors import InvalidRequest
from quire.worker.structured.compilation import AUTO, GrammarLibrary
from quire.worker.structured.grammar import GrammarSpec, num_words

PROMPTS = ["The quick brown fox", "It was the best of times, it was the worst"]
# One token in thirty, so that outputs end at all lengths.
STOPS = tuple(range(20, 380, 30))
SCORE_NOISE = 1e-4

Found = list[tuple[list[int], float]]


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    return load_reference(model_dir)


def load_reference(model_dir: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def search(
    model: Any,
    prompt: list[int],
    params: SamplingParams,
    eos: tuple[int, ...],
    allow: Callable[[list[int]], list[int]] | None = None,
) -> Found:
    """Return the beams of transformers as (tokens, score), best first.

    Args:
        allow: output so far |-> allowed next tokens.
    """
    import torch

    stops = [*eos, *params.stop_token_ids]
    result = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        eos_token_id=stops or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        prefix_allowed_tokens_fn=(
            None if allow is None else lambda _, whole: allow(whole[len(prompt) :].tolist())
        ),
    )
    found = []
    for whole, score in zip(result.sequences.tolist(), result.sequences_scores.tolist(), strict=True):
        output = whole[len(prompt) :]
        end = next(
            (position for position, token in enumerate(output, start=1) if token in stops), len(output)
        )
        found.append((output[:end], score))
    return found


def score_of(model: Any, prompt: list[int], output: list[int], penalty: float) -> float:
    """Return the score of an output by the log-probabilities of transformers."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.log_softmax(dim=-1).gather(1, torch.tensor(output).unsqueeze(1))
    return float(chosen.sum()) / len(output) ** penalty


def assert_equal(
    outputs: list[CompletionOutput], expected: Found, model: Any, prompt: list[int], penalty: float
) -> None:
    """Check that the tokens are equal, or the scores up to float rounding."""
    assert [output.index for output in outputs] == list(range(len(expected)))
    for output, (token_ids, score) in zip(outputs, expected, strict=True):
        assert output.score == pytest.approx(score, abs=SCORE_NOISE)
        if output.token_ids != token_ids:
            ours = score_of(model, prompt, output.token_ids, penalty)
            theirs = score_of(model, prompt, token_ids, penalty)
            assert ours == pytest.approx(theirs, abs=SCORE_NOISE), (output.token_ids, token_ids)


def compare(llm: LLM, model: Any, prompts: list[str], params: SamplingParams) -> list[CompletionOutput]:
    """Check the outputs of all prompts, searched in one batch, and return them."""
    eos = () if params.ignore_eos else llm.config.model.eos_token_ids
    results = llm.generate(prompts, params)
    for result in results:
        expected = search(model, not_none(result.prompt_token_ids), params, eos)
        assert_equal(
            result.outputs, expected, model, not_none(result.prompt_token_ids), params.length_penalty
        )
    return [output for result in results for output in result.outputs]


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [-0.5, 1.0, 2.0])
@pytest.mark.parametrize(("width", "n"), [(2, 1), (4, 2), (6, 6)])
def test_beams_of_a_tiny_model_equal_transformers(
    llm: LLM, reference: Any, width: int, n: int, length_penalty: float, early_stopping: bool
) -> None:
    params = SamplingParams(
        max_tokens=14,
        stop_token_ids=STOPS,
        beam_width=width,
        n=n,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    compare(llm, reference, PROMPTS, params)


def test_beams_end_by_length_and_by_stop_tokens(llm: LLM, reference: Any) -> None:
    params = SamplingParams(max_tokens=14, stop_token_ids=STOPS, beam_width=6, n=6, length_penalty=1.0)
    outputs = compare(llm, reference, PROMPTS, params)
    assert {output.finish_reason for output in outputs} == {"stop", "length"}
    for output in outputs:
        last = output.token_ids[-1]
        assert output.stop_reason == (last if output.finish_reason == "stop" else None)
        assert output.logprobs is None
    scores = [not_none(output.score) for output in outputs[:6]]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("early_stopping", [False, True])
def test_no_beam_is_shorter_than_min_tokens(llm: LLM, reference: Any, early_stopping: bool) -> None:
    params = SamplingParams(
        min_tokens=6, max_tokens=12, stop_token_ids=STOPS, beam_width=4, n=4, early_stopping=early_stopping
    )
    outputs = compare(llm, reference, PROMPTS, params)
    assert min(len(output.token_ids) for output in outputs) > 6


@pytest.mark.parametrize("num_host_kv_blocks", [0, 64])
def test_preemption_does_not_change_beams(model_dir: Path, reference: Any, num_host_kv_blocks: int) -> None:
    params = SamplingParams(max_tokens=24, stop_token_ids=STOPS[:3], beam_width=4, n=3)
    with LLM(
        str(model_dir),
        device="cpu",
        block_size=4,
        num_kv_blocks=16,
        num_host_kv_blocks=num_host_kv_blocks,
        max_num_seqs=12,
    ) as small:
        scheduler = small._engine.scheduler  # type: ignore[attr-defined]
        scheduler._state.costs.swap_blocks_per_s = 1e9  # swap whenever there is host memory
        compare(small, reference, [*PROMPTS, PROMPTS[0] + ","], params)
        assert scheduler.stats.num_preemptions > 0
        assert (scheduler.blocks.num_swapped_blocks > 0) == (num_host_kv_blocks > 0)
        assert scheduler.blocks.num_held_blocks == 0


def test_beams_beside_rows_that_draft_are_the_same(model_dir: Path, llm: LLM) -> None:
    """Beams have no drafts; the other rows of their steps do."""
    settings = [
        SamplingParams(max_tokens=24, stop_token_ids=STOPS[:3], beam_width=4, n=3),
        SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    ]
    expected = llm.generate(PROMPTS, settings)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with (
        fixed_lengths(3),
        LLM(
            str(model_dir), device="cpu", block_size=4, num_kv_blocks=256, speculative_config=drafts
        ) as drafting,
    ):
        found = drafting.generate(PROMPTS, settings)
        assert drafting._engine.scheduler.stats.num_draft_tokens > 0  # type: ignore[attr-defined]
    for output, other in zip(found, expected, strict=True):
        assert [own.token_ids for own in output.outputs] == [own.token_ids for own in other.outputs]


@pytest.fixture(scope="module")
def demo(demo_model_dir: Path) -> Iterator[tuple[LLM, Any]]:
    with LLM("demo", device="cpu", num_kv_blocks=64) as opened:
        yield opened, load_reference(demo_model_dir)


@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping"), [(2, 1.0, False), (4, 0.7, True), (4, 2.0, False)]
)
def test_beams_of_the_demo_model_equal_transformers(
    demo: tuple[LLM, Any], width: int, length_penalty: float, early_stopping: bool
) -> None:
    llm, model = demo
    # The model rarely ends a sequence; periods and commas end outputs as well.
    stops = tuple(
        not_none(llm.generate(end, SamplingParams(max_tokens=1))[0].prompt_token_ids)[0] for end in ".,"
    )
    params = SamplingParams(
        max_tokens=16,
        stop_token_ids=stops,
        beam_width=width,
        n=2,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    compare(llm, model, ["It was a dark evening, and", "My dear sister, we have had no"], params)


FORMS = {
    "schema": StructuredOutputsParams(
        json={"type": "object", "properties": {"a": {"enum": [1, 22, "x"]}, "b": {"type": "boolean"}}},
        disable_any_whitespace=True,
    ),
    "regex": StructuredOutputsParams(regex="[a-e ]{2,6}(yes|no)"),
    "choice": StructuredOutputsParams(choice=["one", "two", "three"]),
}


def allowed_by(llm: LLM, form: StructuredOutputsParams) -> Callable[[list[int]], list[int]]:
    """Return the function from an output to the next tokens that its grammar allows, or the end."""
    model = llm.config.model
    library = GrammarLibrary(model.path, model.vocab_size, model.eos_token_ids)
    grammar = library.load(library.compile(GrammarSpec(**grammar_spec(form)), AUTO))

    def allow(output: list[int]) -> list[int]:
        words, matcher = np.zeros(num_words(model.vocab_size), np.int32), grammar.new_matcher()
        if not all(matcher.accept(token) for token in output):
            return [0]  # of a beam without probability
        matcher.fill_mask(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: model.vocab_size]
        return np.flatnonzero(bits).tolist() or list(model.eos_token_ids)

    return allow


@pytest.mark.parametrize("form", FORMS)
def test_beams_of_a_form_equal_transformers_with_the_same_tokens_excluded(form: str) -> None:
    """The grammar's state follows the beams' forks. Scores are the model's own, and are not normalized again."""
    params = SamplingParams(beam_width=4, n=3, max_tokens=24, structured_outputs=FORMS[form])
    model = load_reference(DEMO_MODEL_PATH)
    with LLM("demo", device="cpu", dtype="float32", block_size=4, max_num_batched_tokens=16) as llm:
        allow, eos = allowed_by(llm, FORMS[form]), llm.config.model.eos_token_ids
        for result in llm.generate(PROMPTS, params):
            prompt = not_none(result.prompt_token_ids)
            expected = search(model, prompt, params, eos, allow)
            assert_equal(result.outputs, expected, model, prompt, params.length_penalty)
            for output in result.outputs:
                assert output.token_ids[-1] in allow(output.token_ids[:-1])


def test_form_with_too_few_outputs_ends_its_search_with_the_reason(llm: LLM) -> None:
    """Each letter is a token, so there are only two outputs."""
    form = StructuredOutputsParams(choice=["a", "b"])
    few = SamplingParams(beam_width=4, n=2, max_tokens=4, structured_outputs=form)
    (result,) = llm.generate(PROMPTS[:1], few)
    assert sorted(output.text for output in result.outputs) == ["a", "b"]
    with pytest.raises(InvalidRequest, match="is 3, and the form has only 2 outputs of this length"):
        llm.generate(PROMPTS[:1], SamplingParams(beam_width=4, n=3, max_tokens=4, structured_outputs=form))
