"""Prompt log-probabilities equal transformers' for any chunk length and any number of ranks."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quire.proto.step import PromptScoring, RowSampling, StepResult
from quire.worker.sampling import prompt_logprobs as prompt_scores

PROMPTS = [[11, 52, 173, 94, 35, 216, 77, 118, 9, 310, 21, 5, 6], [7, 8, 9], [4], list(range(20, 60))]


@pytest.fixture(scope="module")
def expected(make_model: Any) -> list[Tensor]:
    """Return transformers' log-probabilities at each position of each prompt, [P, V]."""
    model = AutoModelForCausalLM.from_pretrained(make_model("llama"), dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1) for prompt in PROMPTS]


def by_row(results: list[StepResult]) -> dict[int, list[tuple[int, float, list[int], list[float]]]]:
    """Return row |-> (position, log-probability, most likely ids and theirs), in the order of the results."""
    rows = defaultdict(list)
    for result in results:
        if result.prompt_logprobs is None:
            continue
        scores = result.prompt_logprobs.logprobs
        columns = scores.index, scores.chosen, scores.top_ids, scores.top
        owners = result.prompt_logprobs.owners.tolist()
        for owner, *entry in zip(owners, *(column.tolist() for column in columns), strict=True):
            rows[owner].append(tuple(entry))
    return rows


@pytest.mark.parametrize("slice_bytes", [prompt_scores.SLICE_BYTES, 1])
@pytest.mark.parametrize(("tp", "chunk_len"), [(1, 512), (1, 4), (2, 7), (4, 512)])
def test_prompt_logprobs_equal_transformers(
    tp: int,
    chunk_len: int,
    slice_bytes: int,
    expected: list[Tensor],
    make_model: Any,
    make_engine: Any,
    planned: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With SLICE_BYTES 1 the head computes one token at a time, as for a very large vocabulary."""
    monkeypatch.setattr(prompt_scores, "SLICE_BYTES", slice_bytes)
    engine = make_engine(make_model("llama"), tp)
    sequences = [
        planned(prompt, 3, RowSampling(temperature=0.0, scoring=PromptScoring(3, 1, len(prompt))))
        for prompt in PROMPTS
    ]
    without_scoring = planned(PROMPTS[0], 3, RowSampling(temperature=0.0))
    rows = by_row(engine.generate([without_scoring, *sequences], chunk_len=chunk_len))
    assert rows.keys() == {sequence.row for sequence in sequences if len(sequence.prompt) > 1}
    for sequence, logprobs in zip(sequences, expected, strict=True):
        reported = rows[sequence.row]
        assert [position for position, *_ in reported] == list(range(1, len(sequence.prompt)))
        for position, chosen, top_ids, top in reported:
            at_position = logprobs[position - 1]
            assert chosen == pytest.approx(float(at_position[sequence.prompt[position]]), abs=1e-4)
            values, ids = at_position.topk(3)
            assert top_ids == ids.tolist()
            assert top == pytest.approx(values.tolist(), abs=1e-4)


def test_only_requested_prompt_tokens_are_scored(make_model: Any, make_engine: Any, planned: Any) -> None:
    """A range of positions, as after a preemption, without most likely tokens."""
    engine = make_engine(make_model("llama"))
    settings = RowSampling(temperature=0.0, scoring=PromptScoring(0, 5, 9))
    sequence = planned(PROMPTS[0], 1, settings)
    rows = by_row(engine.generate([sequence], chunk_len=3))
    assert [(position, top_ids) for position, _, top_ids, _ in rows[sequence.row]] == [
        (p, []) for p in range(5, 9)
    ]
