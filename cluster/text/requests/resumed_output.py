"""ResumedOutput: the events of a request after those that its client has received from another gateway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from ....proto.errors import RequestNotFound
from .output_processor import OutputProcessor
from .outputs import CompletionDelta, CompletionFinished, OutputEvent, PromptLogprobsDelta
from .request import Request
from .resume_position import CompletionPosition, ResumePosition
from .sequence_update import SequenceUpdate


class ResumedOutput:
    """OutputProcessor that takes a request's updates from its beginning and emits only what follows a position.

    Updates are cut where the client's tokens end, so that a delta ends there.
    """

    def __init__(self, processor: OutputProcessor, position: ResumePosition, request: Request) -> None:
        self._processor = processor
        self._position = position
        self._request_id = request.request_id
        self._skipped = ResumePosition()
        self._num_deltas = position.num_deltas
        # index |-> tokens of the client. With best_of, the index of a sequence is known at the end only: every cut is
        # made in each.
        self._cuts = {index: [output.num_tokens] for index, output in position.outputs.items()}
        self._cuts_of_all = (
            sorted({cut for (cut,) in self._cuts.values()}) if request.sampling.is_ranked else []
        )
        self._num_tokens: Counter[int] = Counter()  # sequence |-> tokens processed

    @property
    def is_finished(self) -> bool:
        return self._processor.is_finished

    def has_stop_string(self, index: int) -> bool:
        return self._processor.has_stop_string(index)

    def process(self, index: int, update: SequenceUpdate) -> list[OutputEvent]:
        """Return the events after the received ones that an update of the sequence `index` causes.

        Raises:
            RequestNotFound: the output differs from the received one: the weights were changed.
            QuireError: see `OutputProcessor`.
        """
        events: list[OutputEvent] = []
        for part in self._parts(index, update):
            for event in self._processor.process(index, part):
                events += self._rest(event)
        return events

    def _parts(self, index: int, update: SequenceUpdate) -> Iterator[SequenceUpdate]:
        """Yield the update in parts that end at the cuts. The last token and the end stay together."""
        begin = self._num_tokens[index]
        self._num_tokens[index] += len(update.token_ids)
        cuts = self._cuts_of_all or self._cuts.get(index, [])
        start = 0
        for cut in [cut - begin for cut in cuts if begin < cut < self._num_tokens[index]]:
            yield SequenceUpdate(
                update.token_ids[start:cut],
                update.logprobs[start:cut],
                prompt_logprobs=update.prompt_logprobs if start == 0 else [],
            )
            start = cut
        yield replace(
            update,
            token_ids=update.token_ids[start:],
            logprobs=update.logprobs[start:],
            prompt_logprobs=update.prompt_logprobs if start == 0 else [],
        )

    def _rest(self, event: OutputEvent) -> list[OutputEvent]:
        """Return the part of an event that the client lacks."""
        if isinstance(event, PromptLogprobsDelta):
            return self._rest_of_prompt(event)
        if isinstance(event, CompletionDelta):
            return self._rest_of_delta(event)
        if isinstance(event, CompletionFinished):
            known = self._known(event.index)
            self._check(self._skipped.of(event.index).num_tokens == known.num_tokens)
            return [] if known.has_finished else [event]
        return [event]

    def _rest_of_prompt(self, event: PromptLogprobsDelta) -> list[OutputEvent]:
        num_known = max(0, self._position.num_prompt_logprobs + 1 - event.start)
        if num_known >= len(event.token_ids):
            return []
        start, token_ids, logprobs = event.start + num_known, event.token_ids, event.logprobs
        return [PromptLogprobsDelta(start, token_ids[num_known:], logprobs[num_known:])]

    def _rest_of_delta(self, event: CompletionDelta) -> list[OutputEvent]:
        known, skipped = self._known(event.index), self._skipped.of(event.index)
        if skipped.num_tokens < known.num_tokens:
            skipped.add(event.token_ids)
            self._check(skipped.num_tokens <= known.num_tokens)
            self._check(skipped.num_tokens < known.num_tokens or skipped.checksum == known.checksum)
            return []
        if known.has_last:
            self._check(not event.token_ids)
            return []
        self._num_deltas += 1
        return [replace(event, sequence_number=self._num_deltas)]

    def _known(self, index: int) -> CompletionPosition:
        return self._position.outputs.get(index, CompletionPosition())

    def _check(self, is_same: bool) -> None:
        if not is_same:
            raise RequestNotFound(
                f"request {self._request_id!r} was computed again, and its output differs from what was received: "
                "were the weights changed?"
            )
