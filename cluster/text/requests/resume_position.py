"""ResumePosition: how much of a request's output its client has, in numbers that hold at every gateway.

The events of a stream depend on how fast they are read, so that another gateway cuts the same output into other
events. Its tokens are the same.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .outputs import CompletionDelta, CompletionFinished, PromptLogprobsDelta, StreamEvent


@dataclass(slots=True)
class CompletionPosition:
    """The part of one completion that its client has.

    Attributes:
        checksum: CRC-32 of the token ids, each as four bytes, the lowest first.
        has_last: the delta is there that no other one follows.
        has_finished: the end is there.
    """

    num_tokens: int = 0
    checksum: int = 0
    has_last: bool = False
    has_finished: bool = False

    def add(self, token_ids: Sequence[int]) -> None:
        self.num_tokens += len(token_ids)
        self.checksum = zlib.crc32(array("i", token_ids).tobytes(), self.checksum)


@dataclass(slots=True)
class ResumePosition:
    """The part of a request's output that its client has.

    Attributes:
        outputs: index |-> completion, for those of which it has something.
        num_prompt_logprobs: positions of the prompt.
        num_deltas: deltas of all completions.
    """

    outputs: dict[int, CompletionPosition] = field(default_factory=dict)
    num_prompt_logprobs: int = 0
    num_deltas: int = 0

    def copy(self) -> ResumePosition:
        outputs = {index: replace(output) for index, output in self.outputs.items()}
        return ResumePosition(outputs, self.num_prompt_logprobs, self.num_deltas)

    def of(self, index: int) -> CompletionPosition:
        return self.outputs.setdefault(index, CompletionPosition())

    def take(self, event: StreamEvent) -> None:
        """Count an event."""
        if isinstance(event, CompletionDelta):
            output = self.of(event.index)
            output.add(event.token_ids)
            output.has_last |= event.is_last
            self.num_deltas += 1
        elif isinstance(event, CompletionFinished):
            self.of(event.index).has_finished = True
        elif isinstance(event, PromptLogprobsDelta):
            self.num_prompt_logprobs += len(event.token_ids)
