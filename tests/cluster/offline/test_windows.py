"""Models whose blocks behind a window are freed, in one cache group or several, give the tokens of a whole cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from narrowing import not_none
from reference import Reference, prompts_of

from quire.cluster.config import model_config
from quire.cluster.offline.llm import LLM
from quire.cluster.text.requests.outputs import RequestOutput
from quire.proto.sampling import SamplingParams

# Three blocks of tokens; outputs go on for ten.
WINDOW = 11
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 4,
    "max_num_batched_tokens": 24,
    "audit": True,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


# Model type |-> the windows of its cache groups, and blocks for a long run with drafts. The longest output of mistral
# needs 23 blocks, and 4 of them at once: less than all sequences together have.
KINDS = {"mistral": ([WINDOW], 30), "gemma2": ([0, WINDOW, WINDOW], 60)}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, make_model: Callable[..., Path]) -> Path:
    return make_model(kind, seed=7, sliding_window=WINDOW)


@pytest.fixture(scope="module")
def llm(kind: str, folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), num_kv_blocks=50 * len(KINDS[kind][0]), **OPTIONS) as windowed:
        assert [group.window for group in windowed.config.cache_layout.groups] == KINDS[kind][0]
        yield windowed


@pytest.fixture(scope="module")
def unwindowed(folder: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_config, "layer_windows", lambda model: ())
        with LLM(str(folder), num_kv_blocks=100, **OPTIONS) as plain:
            assert [group.window for group in plain.config.cache_layout.groups] == [0]
            yield plain


def tokens_of(results: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(output.token_ids) for output in result.outputs] for result in results]


def check(results: list[RequestOutput], reference: Reference) -> None:
    for result in results:
        reference.check_greedy(not_none(result.prompt_token_ids), result.outputs[0].token_ids)


def test_long_outputs_with_drafts_equal_transformers(kind: str, folder: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    settings = {"max_num_seqs": 3, "speculative_config": drafts, **OPTIONS}
    with LLM(str(folder), num_kv_blocks=KINDS[kind][1], **settings) as drafting:
        check(drafting.generate(prompts_of([17, 50, 9, 30], seed=3), GREEDY), Reference(folder))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=30, ignore_eos=True),
        SamplingParams(beam_width=3, n=2, max_tokens=30, ignore_eos=True),
    ],
    ids=["several outputs", "beams"],
)
def test_forks_give_the_tokens_of_a_cache_of_all_tokens(
    llm: LLM, unwindowed: LLM, params: SamplingParams
) -> None:
    prompts = prompts_of([21, 34], seed=5)
    assert tokens_of(llm.generate(prompts, params)) == tokens_of(unwindowed.generate(prompts, params))
