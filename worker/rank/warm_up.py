"""Plans that launch every kernel variant of a model once, so that Triton compiles none while requests run.

A variant depends on which arguments a kernel gets, not on their values: on the kinds of sampling that are in a step
together, on logits processors, and on log-probabilities; attention, quantized layers and experts have tiles for few
and for many tokens. Rows decode once after their prompts, with drafted tokens if the engine drafts: a step that no
graph replays launches the decode kernels one by one. Adapters are launched with empty slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ...proto.block_tables import BlockTables, IntArray
from ...proto.config import EngineConfig
from ...proto.lora import NO_SLOT
from ...proto.pooling import PoolingParams
from ...proto.step import NewSequence, PromptScoring, RowLogitsProcessors, RowSampling, StepPlan

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
        for partition in range(config.parallel.num_kv_partitions):
            plans.first_block = partition * num_blocks
            yield from plans.run_tokens(num_tokens)
    for samplings in _KINDS if config.model.generates else ():
        yield from plans.run(samplings, PROMPT_LENS[0])
        processed = [replace(each, logits_processors=_PROCESSORS, scoring=None) for each in samplings]
        yield from plans.run(processed, PROMPT_LENS[0])
    if config.lora is not None:
        yield from plans.run((_GREEDY,), PROMPT_LENS[0], lora_slot=0)


class _Plans:
    """Makes plans, and follows the block tables for their digests.

    Attributes:
        first_block: number of the first block of the partition whose rank attends for the rows.
    """

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        num_groups = len(config.cache_layout.groups)
        self._tables = BlockTables(config.scheduler.max_num_seqs, config.max_blocks_per_seq, num_groups)
        self._block_size = config.cache.block_size
        self._num_blocks = num_blocks
        self.first_block = 0
        self._max_tokens = config.scheduler.max_num_batched_tokens
        self._max_rows = min(config.scheduler.max_num_seqs, self._max_tokens)
        self._num_drafts = 0 if config.speculative is None else config.speculative.num_speculative_tokens
        # Tokens that a row gets after its prompt: the first one, drafts, and the one after them.
        num_generated = 2 + self._num_drafts
        can_decode = config.model.generates and num_generated < config.model.max_model_len
        self._num_generated = num_generated if can_decode else 0
        self._max_len = config.model.max_model_len - max(1, self._num_generated)
        self._pooling = None if config.model.generates else PoolingParams()
        self._step_id = 0

    def run_tokens(self, num_tokens: int) -> Iterator[StepPlan]:
        """Yield steps that compute prompts of together about `num_tokens` tokens."""
        num_rows = -(-num_tokens // self._max_len)
        yield from self.run([_GREEDY] * num_rows, num_tokens // num_rows)

    def run(
        self, samplings: Sequence[RowSampling], prompt_len: int, lora_slot: int = NO_SLOT
    ) -> Iterator[StepPlan]:
        """Yield a step that computes a prompt per sampling, one that decodes, and one that releases the rows."""
        samplings = samplings[: self._max_rows]
        prompt_len = max(1, min(prompt_len, self._max_len, self._max_tokens // len(samplings)))
        num_blocks = self._tables.num_groups * -(-(prompt_len + self._num_generated) // self._block_size)
        if 1 + num_blocks * len(samplings) > self._num_blocks:
            return  # a pool for tests
        new = []
        for row, sampling in enumerate(samplings):
            first = self.first_block + 1 + row * num_blocks
            ids = np.arange(first, first + num_blocks, dtype=np.int32)
            if sampling.scoring is not None and prompt_len < sampling.scoring.end:
                sampling = replace(sampling, scoring=None)
            prompt = np.zeros(prompt_len, np.int32)
            new.append(NewSequence(row, row, prompt, 0, ids, sampling, lora_slot, self._pooling))
            self._tables.put(row, ids)
        rows = np.arange(len(samplings), dtype=np.int32)
        copies = None
        if self._num_blocks > 2:
            copies = _ints([[1, self._num_blocks - 1]]) + np.int32(self.first_block)
        plan = self._plan()
        plan = replace(plan, new=tuple(new), chunk_rows=rows, chunk_lens=np.full_like(rows, prompt_len))
        yield plan if copies is None else replace(plan, copies=copies)
        if self._num_generated:
            plan = self._plan()
            if self._num_drafts:
                plan = replace(plan, draft_rows=rows, draft_lens=np.full_like(rows, self._num_drafts))
            yield plan
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
