"""One sequence's ids become the text that may be shown: no broken characters, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from .tokenizer import IncrementalDecoder, Tokenizer


class Detokenizer:
    """Decodes incrementally and finds stop strings, also across the borders of tokens.

    Args:
        skip_special_tokens: leave out the text of special tokens.
        keep_stop: the stop string is part of the text that is shown.

    Attributes:
        stop_string: the stop string that was found; nothing may be pushed after it.
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
        """The text that can be shown now, and how many of `token_ids` belong to the answer.

        That is all of them, or those up to and including the one that completed a stop string.
        """
        if self._finder is None:
            return self._decoder.push(token_ids), len(token_ids)
        shown = ""
        for count, token_id in enumerate(token_ids, start=1):
            shown += self._find(self._decoder.push((token_id,)))
            if self.stop_string is not None:
                return shown, count
        return shown, len(token_ids)

    def finish(self) -> str:
        """What was held back, once the sequence has ended without a stop string."""
        rest = self._decoder.flush()
        if self._finder is None:
            return rest
        shown = self._find(rest)
        return shown if self.stop_string is not None else shown + self._finder.held

    def _find(self, text: str) -> str:
        assert self._finder is not None
        shown, self.stop_string = self._finder.push(text)
        return shown


class StopFinder:
    """Cuts a text that comes in pieces before, or where it is to be kept after, the first stop string in it.

    First is the one that is completed first, character by character; of several that the same character
    completes, the longest. So the cut does not depend on where the pieces' borders are.

    Args:
        keep: cut after it.

    Attributes:
        held: text that may still become the beginning of a stop string.
    """

    def __init__(self, stop: tuple[str, ...], *, keep: bool = False) -> None:
        self._stop = stop
        self._keep = keep
        self.held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is certainly before the cut, and the stop string that ended it, if one did."""
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
    """Length of the longest end of `text` that begins `stop`, and is not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
