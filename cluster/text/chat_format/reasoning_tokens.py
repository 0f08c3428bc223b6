"""ReasoningTokens: counts the tokens of a completion whose text is reasoning."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .model_output import ModelOutput


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
