"""Incremental detokenization of one sequence, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from .tokenizer import IncrementalDecoder, Tokenizer


class Detokenizer:
    """Decodes a sequence incrementally and finds stop strings, also across token boundaries.

    The text that is returned never ends inside a character, or inside the beginning of a stop string.

    Args:
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
        skip_special_tokens: bool = True,
        keep_stop: bool = False,
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._finder = StopFinder(stop, keep=keep_stop) if stop else None
        self.stop_string: str | None = None

    def push(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Return the new text, and how many of `token_ids` belong to the sequence.

        These are all of them, or those up to and including the token that completed a stop string.
        """
        if self._finder is None:
            return self._decoder.push(token_ids), len(token_ids)
        text = ""
        for count, token_id in enumerate(token_ids, start=1):
            text += self._up_to_stop(self._decoder.push((token_id,)))
            if self.stop_string is not None:
                return text, count
        return text, len(token_ids)

    def finish(self) -> str:
        """Return the text held back so far, when the sequence has ended without a stop string."""
        rest = self._decoder.flush()
        if self._finder is None:
            return rest
        text = self._up_to_stop(rest)
        return text if self.stop_string is not None else text + self._finder.held

    def _up_to_stop(self, new_text: str) -> str:
        assert self._finder is not None
        text, self.stop_string = self._finder.push(new_text)
        return text


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
        self.held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that is certainly kept, and the stop string that ends it, or None."""
        text = self.held + text
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self.held = ""
            return text[: end if self._keep else start], stop
        num_held = max(_overlap(text, stop) for stop in self._stop)
        self.held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
