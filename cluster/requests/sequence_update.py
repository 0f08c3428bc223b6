"""SequenceUpdate: what a step brought for one sequence, taken out of the scheduler's TokenBatch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...proto.step import Logprobs
from ...proto.stream import Finish, TokenBatch
from .outputs import TokenLogprobs


@dataclass(slots=True)
class SequenceUpdate:
    """What has become known of a sequence since its reader last looked. A slow reader's news grow together.

    Attributes:
        token_ids: new tokens, oldest first.
        logprobs: one for each of token_ids where the request asked for them, otherwise empty.
        finish: set once the sequence has ended.
        prompt_logprobs: (place in the prompt, its token's log-probabilities), where the request asked for them.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    prompt_logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)

    def extend(self, later: SequenceUpdate) -> None:
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish = later.finish
        self.prompt_logprobs += later.prompt_logprobs


def split(batch: TokenBatch) -> Iterable[tuple[int, SequenceUpdate]]:
    """handle |-> its news, each handle once, those of a sequence's last tokens and of its end together."""
    news: dict[int, SequenceUpdate] = {}
    logprobs: dict[int, TokenLogprobs] = {}  # position in the batch's token array |-> its log-probabilities
    if batch.logprobs is not None:
        logprobs = dict(zip(batch.logprobs.index.tolist(), _entries(batch.logprobs), strict=True))
    pairs = zip(batch.handles.tolist(), batch.token_ids.tolist(), strict=True)
    for position, (handle, token_id) in enumerate(pairs):
        entry = news.get(handle)
        if entry is None:
            entry = news[handle] = SequenceUpdate()
        entry.token_ids.append(token_id)
        if position in logprobs:
            entry.logprobs.append(logprobs[position])
    if batch.prompt_logprobs is not None:
        scores = batch.prompt_logprobs
        entries = zip(
            scores.owners.tolist(), scores.logprobs.index.tolist(), _entries(scores.logprobs), strict=True
        )
        for handle, position, scored in entries:
            news.setdefault(handle, SequenceUpdate()).prompt_logprobs.append((position, scored))
    for finish in batch.finished:
        news.setdefault(finish.handle, SequenceUpdate()).finish = finish
    return news.items()


def _entries(logprobs: Logprobs) -> Iterable[TokenLogprobs]:
    columns = logprobs.chosen, logprobs.top_ids, logprobs.top
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return (TokenLogprobs(chosen, tuple(ids), tuple(top)) for chosen, ids, top in rows)
