"""ChatOutputParser: the incremental parser of one completion of a chat."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .deltas import AssistantMessage, ChatDelta, collect_message, merge_deltas
from .model_output import ModelOutput, Parse

Grammar = Callable[[ModelOutput], Parse[None]]

STOP, TOOL_CALLS = "stop", "tool_calls"


def new_call_id() -> str:
    """Return a random identifier of a tool call, as OpenAI's API forms them."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ChatOutputParser:
    """Parses one completion: text in, typed deltas out. The deltas joined do not depend on how the text is split.

    Args:
        grammar: reads the whole completion.
        tools: name |-> JSON schema of the parameters, of the functions that the request offers.
        allows_parallel_calls: if not, tool calls after the first are left out.
        new_id: returns the id of a tool call for which the model wrote none.
        reasons: count the tokens of reasoning; `push` then needs the length of each token's text.

    Attributes:
        reasoning_tokens: None unless they are counted.
    """

    def __init__(
        self,
        grammar: Grammar,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        allows_parallel_calls: bool = True,
        new_id: Callable[[], str] = new_call_id,
        reasons: bool = False,
    ) -> None:
        self._allows_parallel_calls = allows_parallel_calls
        self._output = ModelOutput(tools or {}, new_id)
        self.reasoning_tokens = ReasoningTokens(self._output) if reasons else None
        self._parse = grammar(self._output)
        self._deltas: list[ChatDelta] = []

    def push(self, text: str) -> list[ChatDelta]:
        """Return what new text adds to the message."""
        self._output.push(text)
        return self._advance()

    def finish(self) -> list[ChatDelta]:
        """Return what was held back, at the end of the text."""
        self._output.is_complete = True
        return self._advance()

    @property
    def message(self) -> AssistantMessage:
        """The message so far; the whole one after `finish`."""
        return collect_message(self._deltas)

    def finish_reason(self, reason: str) -> str:
        """Return the reason that a client sees: ``tool_calls`` if the model stopped after at least one call."""
        return TOOL_CALLS if reason == STOP and self._output.num_calls else reason

    def _advance(self) -> list[ChatDelta]:
        new = []
        for delta in self._parse:
            if delta is None:
                break
            if self._allows_parallel_calls or getattr(delta, "index", 0) == 0:
                new.append(delta)
        if self.reasoning_tokens is not None:
            self.reasoning_tokens.update()
        new = merge_deltas(new)
        self._deltas += new
        return new


class ReasoningTokens:
    """Counts the tokens between the tags of reasoning, whichever way the tokens arrive together.

    A token without text of its own, as in the middle of a character, belongs to the next one with text.

    Attributes:
        count: so far.
    """

    def __init__(self, output: ModelOutput) -> None:
        self.count = 0
        self._output = output
        self._num_without_text = 0
        self._end = 0  # of the text of all tokens
        # (start, end, number of tokens) of texts that are not read yet, the oldest first
        self._unread: deque[tuple[int, int, int]] = deque()

    def push(self, lengths: Iterable[int]) -> None:
        """Add tokens, of which the text has these numbers of characters."""
        for length in lengths:
            self._num_without_text += 1
            self.push_text(length)

    def push_text(self, length: int) -> None:
        """Add text of the tokens that had none."""
        if length:
            self._unread.append((self._end, self._end + length, self._num_without_text))
            self._end += length
            self._num_without_text = 0

    def update(self) -> None:
        """Count the tokens whose text has been read."""
        read = self._output.position
        while self._unread and self._unread[0][1] <= read:
            start, end, num_tokens = self._unread.popleft()
            if self._is_reasoning(start, end):
                self.count += num_tokens

    def _is_reasoning(self, start: int, end: int) -> bool:
        """Return whether a part of the text overlaps with reasoning; drops reasoning that ends before it."""
        parts = self._output.reasoning
        while parts and parts[0][1] is not None and parts[0][1] <= start:
            del parts[0]
        return bool(parts) and parts[0][0] < end
