"""SequenceUpdate: new tokens and the end of one sequence, taken from the scheduler's TokenBatch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ....proto.codec import FloatArray
from ....proto.step import Logprobs
from ....proto.stream import Finish, TokenBatch


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position as the worker reports them.

    Attributes:
        chosen: of the token at the position, sampled or part of the prompt.
        rank: of that token in the vocabulary; 1 for the most likely one.
        top_token_ids: the most likely tokens, in descending order.
        top_logprobs: one per token of `top_token_ids`.
    """

    chosen: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True)
class SequenceUpdate:
    """New results of one sequence. Updates that the reader has not taken yet are merged with `extend`.

    Attributes:
        token_ids: new tokens, oldest first.
        logprobs: one entry per token of `token_ids` if the request asked for them, otherwise empty.
        finish: set once the sequence has ended.
        prompt_logprobs: of each step if the request asked for them; `index` is the position in the prompt.
        pooled: the vector of a pooled request, with its finish.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    pooled: FloatArray | None = None

    def extend(self, later: SequenceUpdate) -> None:
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish = later.finish
        self.prompt_logprobs += later.prompt_logprobs
        self.pooled = later.pooled


def updates_by_handle(*batches: TokenBatch) -> Iterable[tuple[int, SequenceUpdate]]:
    """Return handle |-> update over consecutive batches, each handle once.

    The last tokens of a sequence and its finish are in one update.
    """
    updates: defaultdict[int, SequenceUpdate] = defaultdict(SequenceUpdate)
    for batch in batches:
        handles = batch.handles.tolist()
        for handle, token_id in zip(handles, batch.token_ids.tolist(), strict=True):
            updates[handle].token_ids.append(token_id)
        if batch.logprobs is not None:
            for index, entry in zip(batch.logprobs.index.tolist(), _entries(batch.logprobs), strict=True):
                updates[handles[index]].logprobs.append(entry)
        if batch.prompt_logprobs is not None:
            owners, scores = batch.prompt_logprobs.owners, batch.prompt_logprobs.logprobs
            for handle in dict.fromkeys(owners.tolist()):
                updates[handle].prompt_logprobs.append(scores.rows(owners == handle))
        for handle, vector in batch.pooled or ():
            updates[handle].pooled = vector
        for finish in batch.finished:
            updates[finish.handle].finish = finish
    return updates.items()


def _entries(logprobs: Logprobs) -> Iterable[TokenLogprobs]:
    columns = logprobs.chosen, logprobs.ranks, logprobs.top_ids, logprobs.top
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return (TokenLogprobs(chosen, rank, tuple(ids), tuple(top)) for chosen, rank, ids, top in rows)
