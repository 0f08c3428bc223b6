"""Each constraint equals transformers' processor on the same logits, on any number of ranks and in any batch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from chi_square import assert_chi_square
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from quire.kernels.logits import apply_logits_processors
from quire.proto.step import NO_INTS, NewSequence, RowLogitsProcessors, RowSampling
from quire.worker.comm.communicator import SingleRank
from quire.worker.comm.shard import Shard
from quire.worker.sampling.logits_processors import LogitsProcessorState
from quire.worker.sampling.sampler import Sampler
from quire.worker.sampling.sampling_table import SamplingTable

VOCAB_SIZE, MAX_LEN = 101, 64
PROMPT, ANSWER = [5, 9, 9, 40], [7, 9, 7, 100]
CPU = torch.device("cpu")


def processors(asked: RowLogitsProcessors) -> LogitsProcessorList:
    """transformers' own, in its order; the penalties of the answer alone are not among them."""
    chain: list[Any] = []
    if asked.logit_bias:
        chain.append(SequenceBiasLogitsProcessor({(token_id,): bias for token_id, bias in asked.logit_bias}))
    if asked.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(asked.repetition_penalty))
    if asked.bad_words:
        chain.append(NoBadWordsLogitsProcessor([list(word) for word in asked.bad_words]))
    if asked.stop_token_ids:
        num_asked = asked.min_len - asked.num_prompt_tokens
        stops = list(asked.stop_token_ids)
        chain.append(MinNewTokensLengthLogitsProcessor(asked.num_prompt_tokens, num_asked, stops))
    if asked.allowed_token_ids is not None:
        allowed = list(asked.allowed_token_ids)
        chain.append(PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, num_beams=1))
    return LogitsProcessorList(chain)


CASES = {
    "bias": RowLogitsProcessors(logit_bias=((0, 3.5), (50, -100.0), (51, 100.0), (100, 0.25))),
    "repetition": RowLogitsProcessors(repetition_penalty=1.7),
    "repetition below 1": RowLogitsProcessors(repetition_penalty=0.6),
    "single bad words": RowLogitsProcessors(bad_words=((3,), (99,))),
    "bad words of several tokens": RowLogitsProcessors(
        bad_words=((100, 4), (7, 100, 5), (9, 100, 6), (*PROMPT, *ANSWER, 8), (1, *PROMPT, *ANSWER, 10), (100, 100))
    ),
    "too early to stop": RowLogitsProcessors(min_len=9, stop_token_ids=(0, 60)),
    "late enough to stop": RowLogitsProcessors(min_len=8, stop_token_ids=(0, 60)),
    "allowed": RowLogitsProcessors(allowed_token_ids=(0, 31, 32, 63, 64, 100)),
    "all": RowLogitsProcessors(
        repetition_penalty=1.3,
        logit_bias=((9, 20.0), (7, -2.0), (64, 30.0)),
        bad_words=((64,), (100, 9), (7, 100, 31)),
        allowed_token_ids=tuple(range(5, 90)),
        min_len=20,
        stop_token_ids=(6,),
    ),
}  # fmt: skip


def sequence_of(
    asked: RowLogitsProcessors | None, row: int = 0, prompt: list[int] = PROMPT, answer: list[int] = ANSWER
) -> NewSequence:
    """A sequence that comes back with an answer begun."""
    processors = asked and replace(asked, num_prompt_tokens=len(prompt))
    tokens = np.array(prompt + answer, np.int32)
    return NewSequence(row, row, tokens, 0, NO_INTS, RowSampling(logits_processors=processors))


class Rank:
    """What a rank keeps of its rows for their constraints."""

    def __init__(self, shard: Shard, num_rows: int) -> None:
        self.shard = shard
        self.token_ids = torch.zeros(num_rows, MAX_LEN, dtype=torch.int32)
        self.lens = np.zeros(num_rows, np.int32)
        self.processors = LogitsProcessorState(shard, self.token_ids)

    def put(self, sequence: NewSequence) -> None:
        self.token_ids[sequence.row, : len(sequence.token_ids)] = torch.from_numpy(sequence.token_ids)
        self.lens[sequence.row] = len(sequence.token_ids)
        self.processors.put(sequence)

    def append(self, rows: list[int], token_ids: list[int]) -> None:
        places = np.array(rows, np.int32)
        tokens = torch.tensor(token_ids, dtype=torch.int32)
        self.token_ids[rows, self.lens[places]] = tokens
        self.processors.append(places, tokens)
        self.lens[places] += 1

    def apply(self, logits: Tensor, rows: list[int]) -> Tensor:
        """The part of [N, VOCAB_SIZE] logits that this rank has, after the rows' constraints."""
        local = torch.full((len(rows), self.shard.padded_len), -torch.inf)
        local[:, : len(self.shard)] = logits[:, self.shard.start : self.shard.end]
        places = np.array(rows, np.int32)
        processors = self.processors.gather(places, self.lens[places])
        changed = local if processors is None else apply_logits_processors(local, processors)
        return changed[:, : len(self.shard)]


def ranks_of(size: int, num_rows: int = 1) -> list[Rank]:
    return [Rank(Shard(rank, size, VOCAB_SIZE), num_rows) for rank in range(size)]


def random_logits(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_transformers(case: str, size: int) -> None:
    asked, logits = CASES[case], random_logits(1)
    ranks = ranks_of(size)
    for rank in ranks:
        rank.put(sequence_of(asked))
    expected = processors(replace(asked, num_prompt_tokens=len(PROMPT)))(
        torch.tensor([PROMPT + ANSWER]), logits.clone()
    )
    changed = torch.cat([rank.apply(logits, [0]) for rank in ranks], dim=1)
    assert case == "late enough to stop" or not torch.equal(expected, logits)
    torch.testing.assert_close(changed, expected)


@pytest.mark.parametrize("size", [1, 3])
def test_penalties_of_the_answer(size: int) -> None:
    """They count what was generated, and not the prompt: each time, and once."""
    asked = RowLogitsProcessors(frequency_penalty=0.5, presence_penalty=-1.25, repetition_penalty=2.0)
    logits = random_logits(1)
    expected = logits.clone()
    for token_id in {*PROMPT, *ANSWER}:
        value = float(logits[0, token_id])
        expected[0, token_id] = value / 2 if value > 0 else value * 2
    for token_id in ANSWER:
        expected[0, token_id] -= 0.5
    for token_id in set(ANSWER):
        expected[0, token_id] += 1.25
    ranks = ranks_of(size)
    for rank in ranks:
        rank.put(sequence_of(asked))
    torch.testing.assert_close(torch.cat([rank.apply(logits, [0]) for rank in ranks], dim=1), expected)


@pytest.mark.parametrize("case", [*CASES, "penalties"])
def test_the_state_of_a_row_is_that_of_its_tokens(case: str) -> None:
    """Token by token, in one go after a preemption, in another row and beside others: the same logits."""
    asked = CASES.get(case) or RowLogitsProcessors(
        frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.2
    )
    logits, more = random_logits(3, seed=3), [9, 64, 100]
    grown, put_back = ranks_of(1, num_rows=4)[0], ranks_of(1, num_rows=4)[0]
    grown.put(sequence_of(asked, row=2, answer=[]))
    grown.put(sequence_of(CASES["all"], row=0))
    grown.put(sequence_of(None, row=1))
    for token_id in ANSWER + more:
        grown.append([0, 1, 2], [17, 18, token_id])
    put_back.put(sequence_of(CASES["repetition"], row=1, prompt=[1, 2, 3]))
    put_back.put(sequence_of(asked, row=1, answer=ANSWER + more))
    together = grown.apply(logits, [0, 1, 2])
    alone = put_back.apply(logits[2:3], [1])
    torch.testing.assert_close(together[2], alone[0], rtol=0, atol=0)
    assert torch.equal(together[1], logits[1])


def test_memory_is_taken_by_rows_that_penalise_and_given_back() -> None:
    rank = ranks_of(1, num_rows=40)[0]
    counts = rank.processors._counts
    for row in range(20):
        rank.put(sequence_of(CASES["bias"], row=row))
    assert len(counts.counts) == 0
    for turn in range(3):
        for row in range(6):
            rank.put(sequence_of(CASES["repetition"], row=(7 * turn + row) % 40))
        rank.processors.release(np.arange(40, dtype=np.int32))
    assert len(counts.counts) == 8
    assert rank.processors.gather(np.arange(40, dtype=np.int32), np.zeros(40, np.int32)) is None
    logits = random_logits(1)
    assert torch.equal(rank.apply(logits, [3]), logits)


def test_a_short_vocabulary_leaves_the_last_ranks_nothing() -> None:
    ranks = [Rank(Shard(rank, 4, 5), 1) for rank in range(4)]
    assert len(ranks[3].shard) == 0
    logits = torch.arange(5.0).unsqueeze(0)
    asked = replace(CASES["repetition"], logit_bias=((4, 1.0),), allowed_token_ids=(1, 4))
    changed = []
    for rank in ranks:
        rank.put(sequence_of(asked, prompt=[1, 2], answer=[4, 0]))
        rank.append([0], [2])
        changed.append(rank.apply(logits, [0]))
    expected = torch.tensor([[-torch.inf, 1 / 1.7, -torch.inf, -torch.inf, 5 / 1.7]])
    torch.testing.assert_close(torch.cat(changed, dim=1), expected)


def sample_constrained(
    size: int, thread_group: Any, logits: Tensor, sampling: RowSampling, lens: list[int]
) -> list[tuple[Tensor, Any]]:
    """Each rank's answer, all rows sampling alike."""
    num_rows = len(logits)
    group = thread_group(size)

    def on_rank(rank: int) -> tuple[Tensor, Any]:
        shard = Shard(rank, size, VOCAB_SIZE)
        table, state = SamplingTable(num_rows, VOCAB_SIZE), Rank(shard, num_rows)
        for row in range(num_rows):
            sequence = sequence_of(sampling.logits_processors, row=row)
            table.put(row, replace(sampling, seed=row))
            state.put(sequence)
        local = torch.full((num_rows, shard.padded_len), -torch.inf)
        local[:, : len(shard)] = logits[:, shard.start : shard.end]
        comm = SingleRank() if size == 1 else group.communicator(rank)
        rows = np.arange(num_rows, dtype=np.int32)
        return Sampler(shard, comm, CPU).sample(
            local, table, rows, np.array(lens, np.int32), state.processors
        )

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(on_rank, range(size), timeout=60))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_stop_tokens_cannot_come_too_early(size: int, thread_group: Any) -> None:
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, 30], logits[:, 7], logits[:, 21] = 9.0, 5.0, 3.0
    early = RowLogitsProcessors(min_len=10, stop_token_ids=(30, 7))
    sampling = RowSampling(temperature=0.0, logprobs=1, logits_processors=early)
    for tokens, logprobs in sample_constrained(size, thread_group, logits, sampling, [9, 10, 11]):
        assert tokens.tolist() == [21, 30, 30]
        # The model's own distribution: the forbidden token is still its likeliest.
        assert logprobs.top_ids[0].tolist() == [30]


@pytest.mark.parametrize("size", [1, 2])
def test_draws_follow_the_changed_distribution(size: int, thread_group: Any) -> None:
    """Chi-square over 4,000 draws of successive seeds."""
    num_draws = 4_000
    asked = replace(CASES["all"], frequency_penalty=0.4, presence_penalty=0.2, num_prompt_tokens=len(PROMPT))
    logits = random_logits(1, seed=5)
    state = ranks_of(1)[0]
    state.put(sequence_of(asked))
    expected = state.apply(logits, [0])[0].double().div(1.5).softmax(dim=-1)
    sampling = RowSampling(temperature=1.5, logits_processors=asked)
    lens = [len(PROMPT + ANSWER)] * num_draws
    tokens, _ = sample_constrained(size, thread_group, logits.expand(num_draws, -1), sampling, lens)[0]
    counts = torch.bincount(tokens.long(), minlength=VOCAB_SIZE).double()
    assert counts[expected == 0].sum() == 0
    assert_chi_square(counts, expected * num_draws)


def test_answers_do_not_depend_on_the_number_of_ranks(
    make_model: Any, make_engine: Any, planned: Any
) -> None:
    """A whole engine, every kind of constraint in its batch."""
    kinds = [
        *(replace(asked, min_len=0) for asked in CASES.values()),
        RowLogitsProcessors(frequency_penalty=1.5, presence_penalty=0.5),
    ]
    answers = []
    for tp in (1, 2, 4):
        engine = make_engine(make_model("llama"), tp, max_num_seqs=16)
        sequences = [
            planned(
                [*PROMPT, row],
                12,
                RowSampling(seed=row, logits_processors=replace(asked, num_prompt_tokens=5)),
                arrival=row // 3,
            )
            for row, asked in enumerate([*kinds, *kinds])
        ]
        engine.generate(sequences, chunk_len=3)
        answers.append([sequence.generated for sequence in sequences])
    assert answers[0] == answers[1] == answers[2]
