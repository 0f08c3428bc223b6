"""StreamPosition: the place of a client in a stream, as the id of its server-sent events.

A client sends the last id that it has as `Last-Event-ID` with the same request, to any gateway, which sends the rest.
The id holds all that the gateway needs for that, since it may know nothing of the request:

    number.deltas.prompt_logprobs.cached.reasoning[.index-tokens-checksum-flags]...
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace

from ....proto.errors import InvalidRequest
from ....proto.sampling import MAX_OUTPUTS
from ...text.requests.outputs import CompletionFinished, StreamEvent
from ...text.requests.resume_position import CompletionPosition, ResumePosition
from ..generation.generation import Generation, GenerationCall

LAST_EVENT_ID = "last-event-id"

_NUMBER = r"(\d{1,9})"
_HEAD = re.compile(r"\.".join([_NUMBER] * 5))
_OUTPUT = re.compile(rf"{_NUMBER}-{_NUMBER}-([0-9a-f]{{1,8}})-([0-3])")
_HAS_LAST, _HAS_FINISHED = 1, 2


@dataclass(slots=True)
class StreamPosition:
    """The part of one request's stream that its client has.

    Attributes:
        number: number of the latest event; None before the first.
        cached_tokens, reasoning_tokens: these tokens of the completions whose end the client has, for the usage.
    """

    number: int | None = None
    resume_position: ResumePosition = field(default_factory=ResumePosition)
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    @staticmethod
    def parse(text: str) -> StreamPosition:
        """Raises InvalidRequest if the text is no id of a stream."""
        parts = text.split(".")
        head = _HEAD.fullmatch(".".join(parts[:5]))
        outputs = [_OUTPUT.fullmatch(part) for part in parts[5 : 5 + MAX_OUTPUTS + 1]]
        if head is None or None in outputs or len(outputs) > MAX_OUTPUTS:
            raise InvalidRequest(
                "Last-Event-ID", f"is {text[:100]!r}, must be the id of an event of this stream"
            )
        number, num_deltas, num_prompt_logprobs, cached, reasoning = map(int, head.groups())
        resume_position = ResumePosition(
            dict(map(_parse_output, filter(None, outputs))), num_prompt_logprobs, num_deltas
        )
        return StreamPosition(number, resume_position, cached, reasoning)

    @staticmethod
    def of_headers(headers: Mapping[str, str], call: GenerationCall) -> StreamPosition:
        """Return the position of the client that sent the headers with its call; the beginning if it has none.

        Raises:
            InvalidRequest: the header is malformed, or the call is not resumable.
        """
        text = headers.get(LAST_EVENT_ID)
        if not text:
            return StreamPosition()
        if not call.is_resumable:
            raise InvalidRequest("Last-Event-ID", "needs resumable and the request_id of the first call")
        position = StreamPosition.parse(text)
        if any(index >= call.sampling.n for index in position.resume_position.outputs):
            raise InvalidRequest("Last-Event-ID", f"is {text[:100]!r}, which is of a request with another n")
        return position

    def resumed(self, call: GenerationCall) -> GenerationCall:
        """Return the call that reads on from here."""
        if self.number is None:
            return call
        return replace(call, after_event=self.number, resume_position=self.resume_position.copy())

    def take(self, number: int, event: StreamEvent) -> None:
        """Move behind an event."""
        self.number = number
        self.resume_position.take(event)
        if isinstance(event, CompletionFinished):
            self.cached_tokens = event.usage.cached_tokens
            self.reasoning_tokens += event.usage.reasoning_tokens

    def mark(self, chunk: bytes) -> bytes:
        """Return the event of the stream with this position as its id."""
        return f"id: {self}\n".encode() + chunk

    def __str__(self) -> str:
        position = self.resume_position
        head = (
            self.number,
            position.num_deltas,
            position.num_prompt_logprobs,
            self.cached_tokens,
            self.reasoning_tokens,
        )
        outputs = [
            f"{index}-{output.num_tokens}-{output.checksum:x}-"
            f"{_HAS_LAST * output.has_last + _HAS_FINISHED * output.has_finished}"
            for index, output in position.outputs.items()
        ]
        return ".".join([*map(str, head), *outputs])


async def chunks_of(
    generation: Generation, to_chunk: Callable[[StreamEvent], bytes], position: StreamPosition | None
) -> AsyncIterator[bytes]:
    """Yield the chunks of a generation's events, with ids if there is a position."""
    async for number, event in generation.numbered_events:
        chunk = to_chunk(event)
        if position is not None:
            position.take(number, event)
        if chunk:
            yield chunk if position is None else position.mark(chunk)


def _parse_output(match: re.Match[str]) -> tuple[int, CompletionPosition]:
    index, num_tokens, checksum, flags = match.groups()
    output = CompletionPosition(
        int(num_tokens), int(checksum, 16), bool(int(flags) & _HAS_LAST), bool(int(flags) & _HAS_FINISHED)
    )
    return int(index), output
