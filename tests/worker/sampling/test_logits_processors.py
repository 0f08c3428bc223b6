"""Each logits processor equals transformers' on the same logits, for any number of ranks and any batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from chi_square import assert_chi_square
from plain_processors import plain_processors
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
from quire.proto.codec import NO_INTS
from quire.proto.step import NewSequence, RowLogitsProcessors, RowSampling
from quire.worker.comm.communicator import SingleRank
from quire.worker.comm.shard import Shard
from quire.worker.sampling.sampler import Sampler
from quire.worker.sampling.sampling_table import SamplingTable

VOCAB_SIZE, MAX_LEN = 101, 64
PROMPT, OUTPUT = [5, 9, 9, 40], [7, 9, 7, 100]
CPU = torch.device("cpu")


def processors(asked: RowLogitsProcessors) -> LogitsProcessorList:
    """Return transformers' processors in its order; frequency and presence penalty are not among them."""
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
        bad_words=((100, 4), (7, 100, 5), (9, 100, 6), (*PROMPT, *OUTPUT, 8), (1, *PROMPT, *OUTPUT, 10), (100, 100))
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
    asked: RowLogitsProcessors | None, row: int = 0, prompt: list[int] = PROMPT, output: list[int] = OUTPUT
) -> NewSequence:
    """Return a resumed sequence that has output tokens."""
    processors = asked and replace(asked, num_prompt_tokens=len(prompt))
    tokens = np.array(prompt + output, np.int32)
    return NewSequence(row, row, tokens, 0, NO_INTS, RowSampling(logits_processors=processors))


class Rank:
    """A rank's rows with their logits processors."""

    def __init__(self, shard: Shard, num_rows: int) -> None:
        self.shard = shard
        self.token_ids = torch.zeros(num_rows, MAX_LEN, dtype=torch.int32)
        self.lens = np.zeros(num_rows, np.int32)
        self.processors = plain_processors(shard, self.token_ids)

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
        """Return this rank's part of [N, VOCAB_SIZE] logits after the rows' processors."""
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
def test_processor_equals_transformers(case: str, size: int) -> None:
    asked, logits = CASES[case], random_logits(1)
    ranks = ranks_of(size)
    for rank in ranks:
        rank.put(sequence_of(asked))
    expected = processors(replace(asked, num_prompt_tokens=len(PROMPT)))(
        torch.tensor([PROMPT + OUTPUT]), logits.clone()
    )
    changed = torch.cat([rank.apply(logits, [0]) for rank in ranks], dim=1)
    assert case == "late enough to stop" or not torch.equal(expected, logits)
    torch.testing.assert_close(changed, expected)


@pytest.mark.parametrize("size", [1, 3])
def test_frequency_and_presence_penalties_count_output_only(size: int) -> None:
    """Frequency counts every occurrence in the output, presence counts a token once."""
    asked = RowLogitsProcessors(frequency_penalty=0.5, presence_penalty=-1.25, repetition_penalty=2.0)
    logits = random_logits(1)
    expected = logits.clone()
    for token_id in {*PROMPT, *OUTPUT}:
        value = float(logits[0, token_id])
        expected[0, token_id] = value / 2 if value > 0 else value * 2
    for token_id in OUTPUT:
        expected[0, token_id] -= 0.5
    for token_id in set(OUTPUT):
        expected[0, token_id] += 1.25
    ranks = ranks_of(size)
    for rank in ranks:
        rank.put(sequence_of(asked))
    torch.testing.assert_close(torch.cat([rank.apply(logits, [0]) for rank in ranks], dim=1), expected)


@pytest.mark.parametrize("case", [*CASES, "penalties"])
def test_state_depends_only_on_tokens_of_row(case: str) -> None:
    """Appended token by token or put at once after a preemption, in any row: the logits are the same."""
    asked = CASES.get(case) or RowLogitsProcessors(
        frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.2
    )
    logits, more = random_logits(3, seed=3), [9, 64, 100]
    grown, put_back = ranks_of(1, num_rows=4)[0], ranks_of(1, num_rows=4)[0]
    grown.put(sequence_of(asked, row=2, output=[]))
    grown.put(sequence_of(CASES["all"], row=0))
    grown.put(sequence_of(None, row=1))
    for token_id in OUTPUT + more:
        grown.append([0, 1, 2], [17, 18, token_id])
    put_back.put(sequence_of(CASES["repetition"], row=1, prompt=[1, 2, 3]))
    put_back.put(sequence_of(asked, row=1, output=OUTPUT + more))
    together = grown.apply(logits, [0, 1, 2])
    alone = put_back.apply(logits[2:3], [1])
    torch.testing.assert_close(together[2], alone[0], rtol=0, atol=0)
    assert torch.equal(together[1], logits[1])


def test_token_counts_are_allocated_for_rows_with_penalties_and_reused() -> None:
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


def test_rank_without_tokens_applies_nothing() -> None:
    ranks = [Rank(Shard(rank, 4, 5), 1) for rank in range(4)]
    assert len(ranks[3].shard) == 0
    logits = torch.arange(5.0).unsqueeze(0)
    asked = replace(CASES["repetition"], logit_bias=((4, 1.0),), allowed_token_ids=(1, 4))
    changed = []
    for rank in ranks:
        rank.put(sequence_of(asked, prompt=[1, 2], output=[4, 0]))
        rank.append([0], [2])
        changed.append(rank.apply(logits, [0]))
    expected = torch.tensor([[-torch.inf, 1 / 1.7, -torch.inf, -torch.inf, 5 / 1.7]])
    torch.testing.assert_close(torch.cat(changed, dim=1), expected)


def sample_processed(
    size: int, thread_group: Any, logits: Tensor, sampling: RowSampling, lens: list[int]
) -> list[tuple[Tensor, Any]]:
    """Return each rank's output; all rows have the same parameters."""
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

    return group.run(on_rank, range(size))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_stop_tokens_are_forbidden_below_min_len(size: int, thread_group: Any) -> None:
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, 30], logits[:, 7], logits[:, 21] = 9.0, 5.0, 3.0
    early = RowLogitsProcessors(min_len=10, stop_token_ids=(30, 7))
    sampling = RowSampling(temperature=0.0, logprobs=1, logits_processors=early)
    for tokens, logprobs in sample_processed(size, thread_group, logits, sampling, [9, 10, 11]):
        assert tokens.tolist() == [21, 30, 30]
        # Log-probabilities are of the unprocessed logits: the forbidden token is still the most likely.
        assert logprobs.top_ids[0].tolist() == [30]


@pytest.mark.parametrize("size", [1, 2])
def test_samples_follow_processed_distribution(size: int, thread_group: Any) -> None:
    """Chi-square over 4,000 samples of successive seeds."""
    num_samples = 4_000
    asked = replace(CASES["all"], frequency_penalty=0.4, presence_penalty=0.2, num_prompt_tokens=len(PROMPT))
    logits = random_logits(1, seed=5)
    state = ranks_of(1)[0]
    state.put(sequence_of(asked))
    expected = state.apply(logits, [0])[0].double().div(1.5).softmax(dim=-1)
    sampling = RowSampling(temperature=1.5, logits_processors=asked)
    lens = [len(PROMPT + OUTPUT)] * num_samples
    tokens, _ = sample_processed(size, thread_group, logits.expand(num_samples, -1), sampling, lens)[0]
    counts = torch.bincount(tokens.long(), minlength=VOCAB_SIZE).double()
    assert counts[expected == 0].sum() == 0
    assert_chi_square(counts, expected * num_samples)


def test_outputs_do_not_depend_on_number_of_ranks(make_model: Any, make_engine: Any, planned: Any) -> None:
    """A whole engine with every kind of processor in its batch."""
    kinds = [
        *(replace(asked, min_len=0) for asked in CASES.values()),
        RowLogitsProcessors(frequency_penalty=1.5, presence_penalty=0.5),
    ]
    outputs = []
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
        outputs.append([sequence.generated for sequence in sequences])
    assert outputs[0] == outputs[1] == outputs[2]
