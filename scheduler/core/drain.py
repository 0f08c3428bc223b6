"""Drainer: gives sequences back, so that the replica gets empty and others go on with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ...proto.stream import Finish, FinishReason, Submit, TokenBatch
from ..sequences.beam_group import BeamGroup
from ..sequences.sequence import Sequence
from .state import RequestKey, SchedulerState


class Drainer:
    """From `begin` on nothing is admitted: what waits is given back at once, what runs at the deadline.

    A beam search, or answers of which the best are given (best_of), are given back together: nothing of them has
    been told, and they begin anew elsewhere. They run as long as one of them does.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._deadline: float | None = None

    @property
    def is_on(self) -> bool:
        return self._deadline is not None

    def begin(self, deadline: float) -> None:
        """Running sequences have until `deadline`; of several, until the earliest."""
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def refuse(self, gateway: bytes, submit: Submit) -> None:
        """Tells the gateway at once that a request which came has to go elsewhere."""
        handles = range(submit.handle, submit.handle + submit.sampling.num_sequences)
        moved = tuple(Finish(handle, FinishReason.MOVED) for handle in handles)
        self._state.news.append((gateway, TokenBatch(0, finished=moved)))

    def give_back(self, now: float) -> None:
        """Gives back what waits, and past the deadline everything. Tokens in flight are sampled again elsewhere."""
        if self._deadline is None:
            return
        is_late = now >= self._deadline
        for keys in self._groups():
            if is_late or not any(self._is_running(self._state.requests[key]) for key in keys):
                for key in keys:
                    self._move(key, now)

    def _groups(self) -> list[list[RequestKey]]:
        """All handles, those that end together in one list."""
        groups: defaultdict[object, list[RequestKey]] = defaultdict(list)
        for key, owner in self._state.requests.items():
            if isinstance(owner, BeamGroup):
                groups[owner].append(key)
            elif owner.sampling.is_ranked:
                groups[owner.gateway, "best of", owner.arrival].append(key)
            else:
                groups[key].append(key)
        return list(groups.values())

    def _is_running(self, owner: Sequence | BeamGroup) -> bool:
        return any(
            sequence.row is not None or (sequence.leader is not None and sequence.leader.row is not None)
            for sequence in self._sequences(owner)
        )

    def _sequences(self, owner: Sequence | BeamGroup) -> Iterator[Sequence]:
        if isinstance(owner, BeamGroup):
            yield from (self._state.alive[seq_id] for seq_id in owner.members)
        else:
            yield owner

    def _move(self, key: RequestKey, now: float) -> None:
        """Ends what answers a handle, and tells its gateway how far it got."""
        owner = self._state.requests.get(key)
        if owner is None:  # it went with another of its beam search
            return
        first = next(self._sequences(owner))
        is_beam = isinstance(owner, BeamGroup)
        num_tokens = first.num_prompt_tokens if is_beam else len(self._state.known_tokens(first))
        moved = tuple(
            first.finish(FinishReason.MOVED, num_tokens, now, handle=handle)
            for _, handle in self._state.end_request(key)
        )
        self._state.news.append((key[0], TokenBatch(0, finished=moved)))
