"""Custom logits processors on ranks: which rows get them, the errors of processors, and several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.proto.step import NewSequence, RowLogitsProcessors, RowSampling
from quire.worker.comm.communicator import SingleRank
from quire.worker.comm.shard import Shard
from quire.worker.sampling.custom_processors import CustomProcessors, ProcessedRow

VOCAB_SIZE = 11
NUM_ROWS = 4


class Bias:
    """Adds its argument to the logit of the newest token; fails as its argument says."""

    def start(self, arguments: Any, prompt_token_ids: Any) -> Any:
        if arguments == "refused":
            raise ValueError("arguments are not allowed")
        return arguments

    def apply(self, logits: Tensor, rows: Sequence[ProcessedRow]) -> Tensor:
        for index, row in enumerate(rows):
            if row.state == "raise":
                raise RuntimeError("a bug")
            if row.state == "nan":
                logits[index] = torch.nan
            elif row.state == "none":
                logits[index] = -torch.inf
            elif row.state == "shape":
                return logits[:, :-1]
            else:
                tokens = [*row.prompt_token_ids, *row.output_token_ids]
                logits[index, tokens[-1]] += row.state
        return logits


def sequence(row: int, arguments: str | None) -> NewSequence:
    extra = () if arguments is None else (("bias", arguments),)
    sampling = RowSampling(logits_processors=RowLogitsProcessors(2, extra_args=extra))
    tokens = np.array([1, 2, row], np.int32)
    return NewSequence(row, row, tokens, 0, np.zeros(1, np.int32), sampling)


def token_ids() -> Tensor:
    return torch.tensor([[1, 2, row, 0] for row in range(NUM_ROWS)], dtype=torch.int32)


def one_rank() -> CustomProcessors:
    return CustomProcessors({"bias": Bias()}, SingleRank(), Shard(0, 1, VOCAB_SIZE), token_ids())


ROWS = np.arange(NUM_ROWS, dtype=np.int32)
LENS = np.full(NUM_ROWS, 3, np.int32)


def test_only_rows_that_ask_are_processed() -> None:
    state, logits = one_rank(), torch.zeros(NUM_ROWS, VOCAB_SIZE)
    assert state.apply(logits, ROWS, LENS) is logits
    state.put(sequence(0, "5"))
    state.put(sequence(1, None))
    state.put(sequence(3, "-7"))
    processed = state.apply(logits, ROWS, LENS)
    expected = torch.zeros(NUM_ROWS, VOCAB_SIZE)
    expected[0, 0], expected[3, 3] = 5, -7
    assert torch.equal(processed, expected)
    assert not logits.any()
    state.release(np.array([0, 3], np.int32))
    assert state.apply(logits, ROWS, LENS) is logits
    assert state.take_failures() == ()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ('"raise"', "RuntimeError: a bug"),
        ('"nan"', "not numbers"),
        ('"none"', "-inf for all tokens"),
        ('"shape"', r"apply returned \[1, 10\], must return logits \[1, 11\]"),
        ('"refused"', "arguments are not allowed"),
        ("not json", "Expecting value"),
    ],
)
def test_failing_processor_is_reported_for_its_row_alone(arguments: str, problem: str) -> None:
    state, logits = one_rank(), torch.zeros(NUM_ROWS, VOCAB_SIZE)
    state.put(sequence(0, "5"))
    state.put(sequence(2, arguments))
    processed = state.apply(logits, ROWS, LENS)
    assert processed[0, 0] == 5
    assert processed[1:].count_nonzero() == 0
    (error,) = state.take_failures()
    assert error.row == 2
    with pytest.raises(ValueError, match=problem):
        raise ValueError(error.reason)
    assert state.take_failures() == ()


def test_all_ranks_get_the_result_of_the_first(thread_group: Callable[[int], Any]) -> None:
    """The vocabulary of 11 tokens does not divide by 2 ranks."""
    group = thread_group(2)
    logits = torch.arange(NUM_ROWS * VOCAB_SIZE, dtype=torch.float32).view(NUM_ROWS, VOCAB_SIZE)

    def run(rank: int) -> Tensor:
        comm = group.communicator(rank)
        shard = Shard(comm.rank, 2, VOCAB_SIZE)
        state = CustomProcessors({"bias": Bias()} if comm.rank == 0 else {}, comm, shard, token_ids())
        state.put(sequence(1, "500"))
        own = torch.full((NUM_ROWS, shard.padded_len), -torch.inf)
        own[:, : len(shard)] = logits[:, shard.start : shard.end]
        return state.apply(own, ROWS, LENS)[:, : len(shard)]

    parts = group.run(run, range(2))
    expected = logits.clone()
    expected[1, 1] += 500
    assert torch.equal(torch.cat(parts, dim=1), expected)
