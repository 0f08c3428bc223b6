"""Log-probabilities of prompts: arrays until an entry is read, equal to lists of entries."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quire.cluster.text.requests.output_processor import OutputProcessor
from quire.cluster.text.requests.outputs import (
    Logprob,
    PromptScores,
    RequestStarted,
    StreamEvent,
    collect_output,
)
from quire.cluster.text.requests.request import Request
from quire.cluster.text.requests.sequence_update import updates_by_handle
from quire.cluster.text.requests.tokenizer import Tokenizer
from quire.proto.sampling import SamplingParams
from quire.proto.step import Logprobs, PromptLogprobs
from quire.proto.stream import Finish, FinishReason, TokenBatch

NUM_TOP = 2
# Each in arrays takes 8. As objects they took 230.
MAX_BYTES_PER_VALUE = 40


@pytest.fixture(scope="module")
def tokenizer(make_model: Callable[..., Path]) -> Tokenizer:
    return Tokenizer(str(make_model("llama")))


def batch(positions: range, num_top: int = NUM_TOP + 1) -> TokenBatch:
    """Scores of two sequences; another request of the step asked for more of the most likely tokens."""
    index = np.array([*positions, 1], dtype=np.int32)
    top_ids = np.tile(np.arange(100, 100 + num_top, dtype=np.int32), (len(index), 1))
    top = np.tile(-np.arange(1, num_top + 1, dtype=np.float32), (len(index), 1))
    scores = Logprobs(index, -index.astype(np.float32), index + 9, top_ids, top)
    owners = np.array([7] * len(positions) + [8], dtype=np.int32)
    return TokenBatch(1, prompt_logprobs=PromptLogprobs(owners, scores))


def outputs(tokenizer: Tokenizer, num_tokens: int, num_top: int, *batches: TokenBatch) -> PromptScores:
    """Return the log-probabilities of a prompt whose token ids are its positions."""
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=num_top)
    request = Request("r", np.arange(num_tokens, dtype=np.int32) % 64, sampling)
    processor = OutputProcessor(request, tokenizer)
    events: list[StreamEvent] = [RequestStarted("r", "tiny", num_tokens)]
    end = TokenBatch(2, finished=(Finish(7, FinishReason.LENGTH),))
    for handle, update in updates_by_handle(*batches, end):
        if handle == 7:
            events += processor.process(0, update)
    output = collect_output(events, prompt=None, prompt_token_ids=None, with_prompt_logprobs=True)
    assert isinstance(output.prompt_logprobs, PromptScores)
    return output.prompt_logprobs


def test_scores_of_a_prompt_equal_a_list_of_entries(tokenizer: Tokenizer) -> None:
    """The second batch repeats positions, as after a move to another replica."""
    scores = outputs(tokenizer, 6, NUM_TOP, batch(range(1, 4)), batch(range(2, 6)))
    expected = [
        None,
        *(
            {position: Logprob(-position, position + 9), 100: Logprob(-1, 1), 101: Logprob(-2, 2)}
            for position in range(1, 6)
        ),
    ]
    assert scores == expected
    assert list(scores) == expected
    assert (scores[0], scores[-1], scores[2:4]) == (None, expected[-1], expected[2:4])
    assert scores != expected[:-1]
    with pytest.raises(IndexError):
        scores[6]


def test_scores_of_a_prompt_stay_arrays(tokenizer: Tokenizer) -> None:
    num_tokens, num_top = 4000, 20
    given = batch(range(1, num_tokens), num_top)
    tracemalloc.start()
    try:
        scores = outputs(tokenizer, num_tokens, num_top, given)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(scores) == num_tokens
    assert peak / (num_tokens * num_top) < MAX_BYTES_PER_VALUE
