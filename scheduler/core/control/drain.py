"""Drainer: hands sequences off, so that the replica empties and other replicas continue them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ....proto.stream import Finish, FinishReason, Submit
from ...sequences.beam_group import BeamGroup
from ...sequences.sequence import Sequence
from ..replies.requests import Producer, RequestKey
from ..state import SchedulerState


class Drainer:
    """The draining of one scheduler: it hands waiting sequences off at once, running ones at a deadline.

    Beams of one search, and outputs of which the best are selected (best_of), are handed off together: none of
    their tokens has been sent, and they start anew elsewhere. They run as long as one of them does.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._deadline: float | None = None

    @property
    def is_on(self) -> bool:
        return self._deadline is not None

    def begin(self, deadline: float) -> None:
        """Let running sequences continue until `deadline`; of several, until the earliest."""
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def reject(self, gateway: bytes, submit: Submit) -> None:
        """Report a new request as moved."""
        handles = range(submit.handle, submit.handle + submit.sampling.num_sequences)
        self._state.outbox.finish(gateway, (Finish(handle, FinishReason.MOVED) for handle in handles))

    def hand_off(self, now: float) -> None:
        """Hand off waiting sequences, and after the deadline all. Tokens in flight are sampled again elsewhere."""
        if self._deadline is None:
            return
        is_late = now >= self._deadline
        for keys in self._groups():
            if is_late or not any(self._is_running(producer) for _, producer in keys):
                for key, _ in keys:
                    self._state.hand_off(key, now)

    def _groups(self) -> list[list[tuple[RequestKey, Producer]]]:
        """Return all handles with their producers, those that end together in one list."""
        groups: defaultdict[object, list[tuple[RequestKey, Producer]]] = defaultdict(list)
        for key, producer in self._state.requests.items():
            if isinstance(producer, BeamGroup):
                group: object = producer
            elif producer.sampling.is_ranked:
                group = producer.gateway, "best of", producer.arrival
            else:
                group = key
            groups[group].append((key, producer))
        return list(groups.values())

    def _is_running(self, producer: Producer) -> bool:
        return any(
            sequence.row is not None or (sequence.parent is not None and sequence.parent.row is not None)
            for sequence in self._sequences(producer)
        )

    def _sequences(self, producer: Producer) -> Iterator[Sequence]:
        if isinstance(producer, BeamGroup):
            yield from (self._state.alive[seq_id] for seq_id in producer.members)
        else:
            yield producer
