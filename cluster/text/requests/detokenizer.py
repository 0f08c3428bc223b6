"""Incremental detokenization of one sequence, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from .incremental_decoder import incremental_decoder
from .tokenizer import Tokenizer


class Detokenizer:
    """Decodes a sequence incrementally and finds stop strings, also across token boundaries.

    The text that is returned never ends inside a character, or inside the beginning of a stop string.

    Args:
        context: ids that the text continues, if there are any.
        min_tokens: ignore stop strings that end within the text of this many tokens.
        skip_special_tokens: leave out the text of special tokens.
        keep_stop: keep the stop string at the end of the text.

    Attributes:
        stop_string: the stop string that was found, after which `push` must not be called; None so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        *,
        context: Sequence[int] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        keep_stop: bool = False,
    ) -> None:
        self._decoder = incremental_decoder(tokenizer, context, skip_special_tokens=skip_special_tokens)
        self._finder = StopFinder(stop, keep=keep_stop) if stop else None
        self._num_exempt = min_tokens  # tokens to come in whose text no stop string ends
        self.stop_string: str | None = None

    def push(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Return the new text, and how many of `token_ids` belong to the sequence.

        These are all of them, or those up to and including the token that completed a stop string.
        """
        if self._finder is None:
            return self._decoder.push(token_ids), len(token_ids)
        text = ""
        for count, token_id in enumerate(token_ids, start=1):
            piece = self._decoder.push((token_id,))
            if self._num_exempt:
                self._num_exempt -= 1
                text += self._finder.skip(piece)
                continue
            text += self._up_to_stop(piece)
            if self.stop_string is not None:
                return text, count
        return text, len(token_ids)

    def finish(self) -> str:
        """Return the text held back so far, when the sequence has ended without a stop string."""
        rest = self._decoder.flush()
        if self._finder is None:
            return rest
        text = self._up_to_stop(rest) if not self._num_exempt else self._finder.skip(rest)
        return text if self.stop_string is not None else text + self._finder.held

    def _up_to_stop(self, new_text: str) -> str:
        assert self._finder is not None
        text, self.stop_string = self._finder.push(new_text)
        return text


class NoText:
    """The detokenizer of a sequence whose text was not requested.

    Attributes:
        stop_string: None, since stop strings need the text.
    """

    stop_string: str | None = None

    def push(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Return no text; all tokens belong to the sequence."""
        return "", len(token_ids)

    def finish(self) -> str:
        """Return no text."""
        return ""


class StopFinder:
    """Truncates a text that arrives in pieces at its first stop string.

    The first stop string is the one whose last character comes first; of several that end at the same character, the
    longest. The result does not depend on how the text is split into pieces.

    Args:
        keep: truncate after the stop string instead of before it.

    Attributes:
        held: text held back, since it may be the beginning of a stop string.
    """

    def __init__(self, stop: tuple[str, ...], *, keep: bool = False) -> None:
        self._stop = stop
        self._keep = keep
        self._num_exempt = 0  # characters of `held` within which no stop string may end
        self.held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that is certainly kept, and the stop string that ends it, or None."""
        text = self.held + text
        found = [
            (start + len(stop), start, stop) for stop in self._stop if (start := self._find(stop, text)) >= 0
        ]
        if found:
            end, start, stop = min(found)
            self.held = ""
            return text[: end if self._keep else start], stop
        return self._release(text), None

    def skip(self, text: str) -> str:
        """Return the text that is certainly kept; no stop string ends in `text`, but one may begin there."""
        text = self.held + text
        self._num_exempt = len(text)
        return self._release(text)

    def _find(self, stop: str, text: str) -> int:
        """Return the start of the first occurrence that ends beyond the exempt characters, or -1."""
        return text.find(stop, max(0, self._num_exempt + 1 - len(stop)))

    def _release(self, text: str) -> str:
        """Return the text without the end that may begin a stop string, which is held back."""
        num_held = max(_overlap(text, stop) for stop in self._stop)
        num_released = len(text) - num_held
        self._num_exempt = max(0, self._num_exempt - num_released)
        self.held = text[num_released:]
        return text[:num_released]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
