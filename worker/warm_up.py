"""Plans that launch every kernel variant of a model once, so that Triton compiles none while requests run.

A variant depends on which arguments a kernel gets, not on their values: on the kinds of sampling that are in a step
together, on logits processors, and on log-probabilities; attention, quantized layers and experts have tiles for few
and for many tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..proto.block_tables import BlockTables, IntArray
from ..proto.config import EngineConfig
from ..proto.pooling import PoolingParams
from ..proto.step import NewSequence, PromptScoring, RowLogitsProcessors, RowSampling, StepPlan

# Prompt tokens of a step, which select each of the tiles; further ones are four times the one before, up to the
# largest step. Tiles of experts depend on the number of experts, and those for some tokens serve a factor of four.
PROMPT_LENS = (3, 40, 128)

_GREEDY = RowSampling(temperature=0.0)
_FULL = RowSampling(temperature=0.9)
_TRUNCATED = RowSampling(temperature=0.9, top_k=2, top_p=0.9)
_PROCESSORS = RowLogitsProcessors(
    num_prompt_tokens=1,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    logit_bias=((0, 1.0),),
    bad_words=((0, 1),),
    allowed_token_ids=(0, 1),
)
# Samplings of the rows of one step. Log-probabilities are of the sampled tokens and of the prompt.
_KINDS = (
    (_GREEDY,),
    (_FULL,),
    (_TRUNCATED,),
    (_FULL, _TRUNCATED),
    (replace(_GREEDY, logprobs=2, scoring=PromptScoring(2, 1, 2)),),
    (_GREEDY, replace(_GREEDY, logprobs=2)),
)


def warm_up_plans(config: EngineConfig, num_blocks: int) -> Iterator[StepPlan]:
    """Yield plans for ranks without sequences; after the last one they have none again."""
    plans = _Plans(config, num_blocks)
    for num_tokens in _token_counts(config.scheduler.max_num_batched_tokens):
        yield from plans.run_tokens(num_tokens)
    for samplings in _KINDS if config.model.generates else ():
        yield from plans.run(samplings, PROMPT_LENS[0])
        processed = [replace(each, logits_processors=_PROCESSORS, scoring=None) for each in samplings]
        yield from plans.run(processed, PROMPT_LENS[0])


class _Plans:
    """Makes plans, and follows the block tables for their digests."""

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        self._tables = BlockTables(config.scheduler.max_num_seqs, config.max_blocks_per_seq)
        self._block_size = config.cache.block_size
        self._num_blocks = num_blocks
        self._max_tokens = config.scheduler.max_num_batched_tokens
        self._max_rows = min(config.scheduler.max_num_seqs, self._max_tokens)
        self._max_len = config.model.max_model_len - 1
        self._pooling = None if config.model.generates else PoolingParams()
        self._step_id = 0

    def run_tokens(self, num_tokens: int) -> Iterator[StepPlan]:
        """Yield steps that compute prompts of together about `num_tokens` tokens."""
        num_rows = -(-num_tokens // self._max_len)
        yield from self.run([_GREEDY] * num_rows, num_tokens // num_rows)

    def run(self, samplings: Sequence[RowSampling], prompt_len: int) -> Iterator[StepPlan]:
        """Yield a step that computes a prompt per sampling, and one that releases the rows."""
        samplings = samplings[: self._max_rows]
        prompt_len = max(1, min(prompt_len, self._max_len, self._max_tokens // len(samplings)))
        num_blocks = -(-prompt_len // self._block_size)
        if 1 + num_blocks * len(samplings) > self._num_blocks:
            return  # a pool for tests
        new = []
        for row, sampling in enumerate(samplings):
            ids = np.arange(1 + row * num_blocks, 1 + (row + 1) * num_blocks, dtype=np.int32)
            if sampling.scoring is not None and prompt_len < sampling.scoring.end:
                sampling = replace(sampling, scoring=None)
            new.append(
                NewSequence(row, row, np.zeros(prompt_len, np.int32), 0, ids, sampling, pooling=self._pooling)
            )
            self._tables.append(np.full(num_blocks, row, dtype=np.int32), ids)
        rows = np.arange(len(samplings), dtype=np.int32)
        copies = _ints([[1, self._num_blocks - 1]]) if self._num_blocks > 2 else None
        plan = self._plan()
        plan = replace(plan, new=tuple(new), chunk_rows=rows, chunk_lens=np.full_like(rows, prompt_len))
        yield plan if copies is None else replace(plan, copies=copies)
        self._tables.release(rows)
        yield replace(self._plan(), released_rows=rows)

    def _plan(self) -> StepPlan:
        self._step_id += 1
        return StepPlan(self._step_id, 0, self._tables.digest)


def _token_counts(max_tokens: int) -> Iterator[int]:
    """Yield the numbers of prompt tokens of steps."""
    yield from PROMPT_LENS
    num_tokens = 4 * PROMPT_LENS[-1]
    while num_tokens < max_tokens:
        yield num_tokens
        num_tokens *= 4
    yield max_tokens


def _ints(values: list[list[int]]) -> IntArray:
    return np.array(values, dtype=np.int32)
