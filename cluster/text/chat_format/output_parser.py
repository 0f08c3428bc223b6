"""ChatOutputParser: the incremental parser of one completion of a chat."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from .deltas import AssistantMessage, ChatDelta, collect_message, merge_deltas
from .model_output import ModelOutput, Parse
from .reasoning_tokens import ReasoningTokens

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
