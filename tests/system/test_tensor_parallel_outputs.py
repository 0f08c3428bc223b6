"""Two tensor-parallel ranks generate the same outputs as one rank, for requests with several sequences."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from deadlines import READY_TIMEOUT_S

from quire import LLM, Client, RequestOutput, SamplingParams
from quire.cluster.cli.demo.server import ServerProcess

pytestmark = pytest.mark.cluster

PROMPTS = ("It was a dark evening, and", "My dear sister, we have had no rest since the rain began, and")
PARAMS = (
    SamplingParams(max_tokens=24, temperature=0.8, seed=5, n=4, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=5, n=2, best_of=4, ignore_eos=True),
    SamplingParams(max_tokens=20, beam_width=4, n=3, length_penalty=0.8),
    # Needs more candidates per beam than the log-probabilities that a request may ask for.
    SamplingParams(max_tokens=20, min_tokens=4, beam_width=4, n=4, stop_token_ids=tuple(range(5, 60, 5))),
    SamplingParams(
        max_tokens=24, temperature=0.8, seed=5, n=2, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.5,
        presence_penalty=0.5, logit_bias={20: 2.0, 2000: -5.0}, bad_words=("the", "night air"), prompt_logprobs=3,
        allowed_token_ids=tuple(range(10, 2900)),
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def one_rank() -> Iterator[LLM]:
    with LLM("demo", device="cpu", num_kv_blocks=64) as llm:
        yield llm


def chosen_prompt_logprobs(result: RequestOutput) -> list[float | None]:
    """The log-probability of each token of the prompt, which is its position's first entry."""
    entries = result.prompt_logprobs or ()
    return [None if entry is None else next(iter(entry.values())).logprob for entry in entries]


def test_outputs_of_two_ranks_equal_outputs_of_one(server: ServerProcess, one_rank: LLM) -> None:
    cases = [(prompt, params) for params in PARAMS for prompt in PROMPTS]
    expected = one_rank.generate([prompt for prompt, _ in cases], [params for _, params in cases])
    with Client(server.address) as client, ThreadPoolExecutor(len(cases)) as pool:
        results = list(pool.map(lambda case: client.generate(*case), cases))
        deadline = time.monotonic() + READY_TIMEOUT_S
        while client.status()[0].kv.num_used_blocks:
            assert time.monotonic() < deadline, "blocks are used after all requests"
    for case, result, one in zip(cases, results, expected, strict=True):
        tokens = [output.token_ids for output in result.outputs]
        assert tokens == [output.token_ids for output in one.outputs], case
        scores = [output.score for output in result.outputs]
        assert scores == pytest.approx([output.score for output in one.outputs], abs=1e-4)
        assert chosen_prompt_logprobs(result) == pytest.approx(chosen_prompt_logprobs(one), abs=1e-4)
