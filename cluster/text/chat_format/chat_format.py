"""ChatFormat: the formats of one model's reasoning and tool calls, and the parsers of its completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from .model_output import ModelOutput, Parse
from .output_parser import ChatOutputParser, new_call_id
from .reasoning import ReasoningFormat, ReasoningStart
from .registry import AUTO, NONE, REASONING_FORMATS, TOOL_CALL_FORMATS, detect
from .tool_format import ToolCallFormat

Format = TypeVar("Format", ToolCallFormat, ReasoningFormat)
Tools = Mapping[str, Mapping[str, Any]]  # name |-> JSON schema of the parameters


@dataclass(frozen=True, slots=True)
class OpenReasoning:
    """Reasoning at the beginning of a completion.

    Attributes:
        start_tags: texts with which it begins; empty if it has begun.
        end_tags: texts that end it.
    """

    start_tags: tuple[str, ...]
    end_tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Formats of a model's output; None for one that is not parsed."""

    tool_calls: ToolCallFormat | None = None
    reasoning: ReasoningFormat | None = None

    @staticmethod
    def find(tool_call_parser: str, reasoning_parser: str, template: str | None) -> ChatFormat:
        """Return the formats of these names; ``auto`` means what the chat template shows, ``none`` none."""
        return ChatFormat(
            _find(TOOL_CALL_FORMATS, tool_call_parser, template),
            _find(REASONING_FORMATS, reasoning_parser, template),
        )

    def without_tool_calls(self) -> ChatFormat:
        return ChatFormat(None, self.reasoning)

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that must not be left out of the output, even if they are special tokens."""
        return *(self.tool_calls.markers if self.tool_calls else ()), *(
            self.reasoning.markers if self.reasoning else ()
        )

    def open_reasoning(self, prompt: str) -> OpenReasoning | None:
        """Return the texts around the reasoning that may follow a rendered prompt; None if none does."""
        if self.reasoning is None:
            return None
        start = self.reasoning.start(prompt)
        if start is ReasoningStart.CLOSED:
            return None
        start_tags = self.reasoning.start_tags if start is ReasoningStart.UNKNOWN else ()
        return OpenReasoning(start_tags, self.reasoning.end_tags)

    def parser(
        self,
        prompt: str,
        tools: Tools,
        *,
        allows_parallel_calls: bool = True,
        new_id: Callable[[], str] | None = None,
    ) -> ChatOutputParser:
        """Return a parser of one completion.

        Args:
            prompt: the rendered prompt.
            tools: the functions that the request offers.
            allows_parallel_calls: if not, calls after the first are left out.
            new_id: returns the id of a tool call for which the model wrote none; None for the format's own.
        """
        if new_id is None:
            new_id = new_call_id if self.tool_calls is None else self.tool_calls.new_id
        return ChatOutputParser(
            self._grammar(prompt),
            tools,
            allows_parallel_calls=allows_parallel_calls,
            new_id=new_id,
            reasons=self.reasoning is not None,
        )

    def _grammar(self, prompt: str) -> Callable[[ModelOutput], Parse[None]]:
        reasoning, tool_calls = self.reasoning, self.tool_calls
        start = None if reasoning is None else reasoning.start(prompt)

        def read(output: ModelOutput) -> Parse[None]:
            if reasoning is not None and start is not None:
                yield from reasoning.read(output, start, tool_calls)
            if tool_calls is not None:
                yield from tool_calls.read(output)
            yield from output.content_until()

        return read


def _find(formats: Mapping[str, Format], wanted: str, template: str | None) -> Format | None:
    name = wanted if wanted != AUTO else detect(formats, template or "")
    return None if name is None or name == NONE else formats[name]
