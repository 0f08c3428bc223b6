"""Requests are checked once, before anything runs, and every refusal names the field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.resolve import engine_config
from quire.cluster.requests.request import MAX_NAME_CHARS, RequestChecker
from quire.proto.config import EngineConfig, ModelConfig
from quire.proto.errors import InvalidRequest
from quire.proto.sampling import SamplingParams

CONFIG = engine_config(
    EngineOptions("tiny", block_size=16, num_kv_blocks=100),
    ModelConfig(
        path="", name="tiny", architecture="", hf={}, dtype="float32", max_model_len=100, vocab_size=50,
        num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1, seed=3,
    ),
)  # fmt: skip


class LetterTokenizer:
    """One token a letter; 49 before a text, unless it is told not to."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        letters = [ord(letter) - ord("a") for letter in text]
        return [49, *letters] if add_special_tokens and text.startswith("z") else letters

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        return [tuple(self.encode(word)), (40, *self.encode(word))]


def checker(config: EngineConfig = CONFIG) -> RequestChecker:
    return RequestChecker(config, LetterTokenizer())  # type: ignore[arg-type]


def test_text_becomes_tokens() -> None:
    request = checker().check("abc", SamplingParams(seed=5), request_id="mine")
    assert (request.request_id, request.sampling.seed) == ("mine", 5)
    assert request.prompt_token_ids.tolist() == [0, 1, 2]
    assert request.prompt_token_ids.dtype == np.int32


@pytest.mark.parametrize("prompt", [[3, 4], (3, 4), np.array([3, 4]), range(3, 5)])
def test_token_ids_in_any_sequence(prompt: Sequence[int]) -> None:
    assert checker().check(prompt, SamplingParams()).prompt_token_ids.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("prompt", "field", "said"),
    [
        ("", "prompt", "is empty"),
        ([], "prompt", "is empty"),
        ([1, 50], "prompt[1]", "is 50, must be a token id from 0 to 49"),
        ([-1], "prompt[0]", "is -1"),
        ([1.5], "prompt[0]", "is 1.5"),
        (["a"], "prompt[0]", "is 'a'"),
        ("a\ud800", "prompt", "not valid Unicode text at character 1"),
        ([1] * 100, "prompt", "has 100 tokens, which leaves no room for an answer in the context of 100"),
    ],
)
def test_prompts_that_cannot_be_served(prompt: str | list[int], field: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        checker().check(prompt, SamplingParams())
    assert caught.value.field == field


def test_a_prompt_larger_than_the_pool_names_the_pool() -> None:
    small = replace(CONFIG, cache=replace(CONFIG.cache, num_blocks=4))
    assert checker(small).check([1] * 47, SamplingParams()).sampling.max_tokens == 1
    with pytest.raises(InvalidRequest, match=r"has 48 tokens.*whole KV memory of 48 tokens"):
        checker(small).check([1] * 48, SamplingParams())


def test_stop_tokens_must_exist() -> None:
    with pytest.raises(InvalidRequest) as caught:
        checker().check("abc", SamplingParams(stop_token_ids=(7, 50)))
    assert caught.value.field == "sampling.stop_token_ids[1]"


@pytest.mark.parametrize("field", ["request_id", "tenant", "cache_salt"])
def test_long_names_are_refused(field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checker().check("abc", SamplingParams(), **{field: "x" * (MAX_NAME_CHARS + 1)})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_more_beams_than_rows_are_refused() -> None:
    few_rows = replace(CONFIG, scheduler=replace(CONFIG.scheduler, max_num_seqs=3))
    assert checker(few_rows).check("abc", SamplingParams(beam_width=3)).sampling.beam_width == 3
    with pytest.raises(InvalidRequest, match="is 4, this replica runs at most 3 at once") as caught:
        checker(few_rows).check("abc", SamplingParams(beam_width=4))
    assert caught.value.field == "sampling.beam_width"


def test_whose_it_is_reaches_the_scheduler() -> None:
    request = checker().check(
        "abc", SamplingParams(), tenant="gold", priority=-2, timeout_s=1.5, cache_salt="é"
    )
    submit = request.submit(7)
    assert (submit.handle, submit.tenant, submit.priority, submit.timeout_s) == (7, "gold", -2, 1.5)
    assert submit.salt == "é".encode()


def test_ranking_needs_the_logprobs_that_the_caller_did_not_ask_for() -> None:
    for params, asked in (
        (SamplingParams(n=2), None),
        (SamplingParams(n=2, best_of=3), 0),
        (SamplingParams(n=2, best_of=3, logprobs=4), 4),
        (SamplingParams(beam_width=3), None),
    ):
        assert checker().check("abc", params).submit(1).sampling.logprobs == asked


@pytest.mark.parametrize(("asked", "given"), [(None, 97), (1000, 97), (97, 97), (5, 5)])
def test_max_tokens_is_cut_to_the_room_left(asked: int | None, given: int) -> None:
    assert checker().check("abc", SamplingParams(max_tokens=asked)).sampling.max_tokens == given


def test_request_ids_are_made_up_and_differ() -> None:
    check = checker()
    assert len({check.check("abc", SamplingParams()).request_id for _ in range(10)}) == 10


def test_seeds_are_drawn_and_repeat_with_the_configuration() -> None:
    def seeds(check: RequestChecker) -> list[int | None]:
        return [check.check("abc", SamplingParams()).sampling.seed for _ in range(5)]

    first = seeds(checker())
    assert len(set(first)) == 5
    assert seeds(checker()) == first
    assert seeds(checker(replace(CONFIG, model=replace(CONFIG.model, seed=4)))) != first
