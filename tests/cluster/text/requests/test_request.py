"""RequestChecker: valid requests, defaults, and the field that each error names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.resolve import engine_config
from quire.cluster.text.requests.request import MAX_NAME_CHARS, RequestChecker
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
    """One token per letter; texts that begin with z get the special token 49 in front."""

    def encode(self, text: str, *, add_special_tokens: bool = True, pair: str | None = None) -> list[int]:
        letters = [ord(letter) - ord("a") for letter in text]
        return [49, *letters] if add_special_tokens and text.startswith("z") else letters

    def word_token_ids(self, word: str) -> list[tuple[int, ...]]:
        return [tuple(self.encode(word)), (40, *self.encode(word))]


def checker(config: EngineConfig = CONFIG) -> RequestChecker:
    return RequestChecker(config, LetterTokenizer())  # type: ignore[arg-type]


def test_text_prompt_is_tokenized() -> None:
    request = checker().check("abc", SamplingParams(seed=5), request_id="mine")
    assert (request.request_id, request.sampling.seed) == ("mine", 5)
    assert request.prompt_token_ids.tolist() == [0, 1, 2]
    assert request.prompt_token_ids.dtype == np.int32


@pytest.mark.parametrize("prompt", [[3, 4], (3, 4), np.array([3, 4]), range(3, 5)])
def test_token_ids_may_be_any_sequence(prompt: Sequence[int]) -> None:
    assert checker().check(prompt, SamplingParams()).prompt_token_ids.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("prompt", "field", "problem"),
    [
        ("", "prompt", "is empty"),
        ([], "prompt", "is empty"),
        ([1, 50], "prompt[1]", "is 50, must be a token id from 0 to 49"),
        ([-1], "prompt[0]", "is -1"),
        ([1.5], "prompt[0]", "is 1.5"),
        (["a"], "prompt[0]", "is 'a'"),
        ("a\ud800", "prompt", "not valid Unicode text at character 1"),
        ([1] * 100, "prompt", "has 100 tokens, which leaves no room for an output in the context of 100"),
    ],
)
def test_invalid_prompt_is_refused(prompt: str | list[int], field: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as caught:
        checker().check(prompt, SamplingParams())
    assert caught.value.field == field


def test_prompt_larger_than_the_kv_memory_is_refused() -> None:
    small = replace(CONFIG, cache=replace(CONFIG.cache, num_kv_blocks=4))
    assert checker(small).check([1] * 47, SamplingParams()).sampling.max_tokens == 1
    with pytest.raises(InvalidRequest, match=r"has 48 tokens.*whole KV memory of 48 tokens"):
        checker(small).check([1] * 48, SamplingParams())


def test_stop_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        checker().check("abc", SamplingParams(stop_token_ids=(7, 50)))
    assert caught.value.field == "sampling.stop_token_ids[1]"


@pytest.mark.parametrize("field", ["request_id", "tenant", "cache_salt"])
def test_long_names_are_refused(field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checker().check("abc", SamplingParams(), **{field: "x" * (MAX_NAME_CHARS + 1)})  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["request_id", "tenant", "cache_salt"])
def test_names_that_are_no_unicode_are_refused(field: str) -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode") as caught:
        checker().check("abc", SamplingParams(), **{field: "\ud800"})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_stop_strings_that_are_no_unicode_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode") as caught:
        checker().check("abc", SamplingParams(stop=("a", "\ud800")))
    assert caught.value.field == "sampling.stop[1]"


def test_beam_search_wider_than_the_batch_is_refused() -> None:
    few_rows = replace(CONFIG, scheduler=replace(CONFIG.scheduler, max_num_seqs=3))
    assert checker(few_rows).check("abc", SamplingParams(beam_width=3)).sampling.beam_width == 3
    with pytest.raises(InvalidRequest, match="is 4, this replica runs at most 3 at once") as caught:
        checker(few_rows).check("abc", SamplingParams(beam_width=4))
    assert caught.value.field == "sampling.beam_width"


def test_tenant_priority_and_salt_reach_the_scheduler() -> None:
    request = checker().check(
        "abc", SamplingParams(), tenant="gold", priority=-2, timeout_s=1.5, cache_salt="é"
    )
    submit = request.submit_message(7)
    assert (submit.handle, submit.tenant, submit.priority, submit.timeout_s) == (7, "gold", -2, 1.5)
    assert submit.salt == "é".encode()


def test_best_of_requests_logprobs_from_the_scheduler() -> None:
    for params, asked in (
        (SamplingParams(n=2), None),
        (SamplingParams(n=2, best_of=3), 0),
        (SamplingParams(n=2, best_of=3, logprobs=4), 4),
        (SamplingParams(beam_width=3), None),
    ):
        assert checker().check("abc", params).submit_message(1).sampling.logprobs == asked


@pytest.mark.parametrize(("asked", "given"), [(None, 97), (1000, 97), (97, 97), (5, 5)])
def test_max_tokens_is_limited_by_the_context(asked: int | None, given: int) -> None:
    assert checker().check("abc", SamplingParams(max_tokens=asked)).sampling.max_tokens == given


def test_generated_request_ids_are_unique() -> None:
    check = checker()
    assert len({check.check("abc", SamplingParams()).request_id for _ in range(10)}) == 10


def test_drawn_seeds_repeat_with_the_configuration() -> None:
    def seeds(check: RequestChecker) -> list[int | None]:
        return [check.check("abc", SamplingParams()).sampling.seed for _ in range(5)]

    first = seeds(checker())
    assert len(set(first)) == 5
    assert seeds(checker()) == first
    assert seeds(checker(replace(CONFIG, model=replace(CONFIG.model, seed=4)))) != first


@pytest.mark.parametrize(
    ("max_logprobs", "requested", "count"),
    [(20, 20, 20), (-1, -1, 50), (-1, 70, 50), (50, -1, 50), (0, 0, 0)],
)
def test_logprobs_are_limited_by_the_vocabulary(max_logprobs: int, requested: int, count: int) -> None:
    params = SamplingParams(logprobs=requested, prompt_logprobs=requested)
    sampling = checker(with_max_logprobs(max_logprobs)).check("abc", params).sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (count, count)


@pytest.mark.parametrize(
    ("max_logprobs", "requested", "problem"),
    [
        (20, 21, "is 21, must be at most 20, the server's max_logprobs"),
        (20, -1, "is -1, the whole vocabulary of 50 tokens, must be at most 20"),
        (0, 1, "is 1, must be at most 0"),
    ],
)
@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_the_server_allows_are_refused(
    max_logprobs: int, requested: int, problem: str, field: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem) as caught:
        checker(with_max_logprobs(max_logprobs)).check("abc", SamplingParams(**{field: requested}))  # type: ignore[arg-type]
    assert caught.value.field == f"sampling.{field}"


def test_seed_of_minus_one_is_random() -> None:
    check = checker()
    seeds = [check.check("abc", SamplingParams(seed=seed)).sampling.seed for seed in (-1, -1, None, -2)]
    assert len(set(seeds)) == 4
    assert -1 not in seeds
    assert seeds[3] == -2


def test_field_that_was_set_is_checked() -> None:
    params = SamplingParams()
    params.top_p = 7.0
    with pytest.raises(InvalidRequest, match=r"sampling.top_p: is 7\.0"):
        checker().check("abc", params)


def test_request_keeps_the_parameters_that_it_was_checked_with() -> None:
    params = SamplingParams(max_tokens=5, seed=1)
    request = checker().check("abc", params)
    params.max_tokens = 2
    assert request.sampling.max_tokens == 5


def with_max_logprobs(max_logprobs: int) -> EngineConfig:
    return replace(CONFIG, scheduler=replace(CONFIG.scheduler, max_logprobs=max_logprobs))


class CountingTokenizer(LetterTokenizer):
    """Of which no token has more than three characters."""

    def __init__(self, max_token_chars: int | None) -> None:
        self.num_calls = 0
        self._max_token_chars = max_token_chars

    def encode(self, text: str, *, add_special_tokens: bool = True, pair: str | None = None) -> list[int]:
        self.num_calls += 1
        return super().encode(text, add_special_tokens=add_special_tokens)

    def max_chars(self, num_tokens: int) -> int | None:
        return None if self._max_token_chars is None else num_tokens * self._max_token_chars


@pytest.mark.parametrize(
    ("max_token_chars", "sampling", "num_calls", "problem"),
    [
        (3, SamplingParams(), 0, "has 5000 characters; 100 tokens of context hold 300 at most"),
        (50, SamplingParams(), 1, "has 5000 tokens"),
        (None, SamplingParams(), 1, "has 5000 tokens"),
        (3, SamplingParams(truncate_prompt_tokens=99), 1, ""),
    ],
)
def test_text_that_cannot_fit_is_not_tokenized(
    max_token_chars: int | None, sampling: SamplingParams, num_calls: int, problem: str
) -> None:
    tokenizer = CountingTokenizer(max_token_chars)
    checker = RequestChecker(CONFIG, tokenizer)  # type: ignore[arg-type]
    if problem:
        with pytest.raises(InvalidRequest, match=problem):
            checker.check("a" * 5000, sampling)
    else:
        assert len(checker.check("a" * 5000, sampling).prompt_token_ids) == 99
    assert tokenizer.num_calls == num_calls
