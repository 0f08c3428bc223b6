"""Incremental detokenization of one sequence, with stop strings.

The pieces of text joined equal the text that the sequence adds to its context, as `Tokenizer.decode` has it. There is
one exception: a byte-fallback tokenizer decodes every byte of a run of byte tokens to U+FFFD if the run is not valid
UTF-8 as a whole. Its complete characters were emitted before the end of the run is known, so here they stay, and each
incomplete or invalid character is one U+FFFD, as for byte-level tokenizers.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

from .tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Far more than one character has. Bounds the tokens held back if the model samples ids that never form a character.
_MAX_HELD_TOKENS = 32


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


class IncrementalDecoder(Protocol):
    """Decodes one sequence. Text that ends inside a character is held back."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids complete; may be empty."""
        ...

    def flush(self) -> str:
        """Return the text held back so far, with U+FFFD for an incomplete character."""
        ...


def incremental_decoder(
    tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special_tokens: bool = True
) -> IncrementalDecoder:
    """Return a decoder of one sequence.

    Args:
        context: ids that the text continues. Without any, tokenizers that mark the space before a word leave it out
            at the beginning of the text.
        skip_special_tokens: leave out the text of special tokens.
    """
    if tokenizer.is_byte_level:
        return ByteDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
    if tokenizer.fallback_bytes:
        return ByteFallbackDecoder(tokenizer, context, skip_special_tokens=skip_special_tokens)
    return WindowDecoder(tokenizer, context, skip_special_tokens=skip_special_tokens)


class ByteDecoder:
    """Decoder for tokenizers whose tokens stand for bytes, whatever their neighbors are.

    Takes 0.7 us per token, where a WindowDecoder takes 9 us (AMD EPYC).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._bytes_of = tokenizer.shown_bytes if skip_special_tokens else tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._bytes_of.__getitem__, token_ids)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDecoder:
    """Decoder for all tokenizers.

    A token's text depends on its neighbors. So each call decodes a short window with and without the new tokens, and
    returns the difference, as Hugging Face's text-generation-inference does. tokenizers' DecodeStream cannot report
    the text that it holds back, and raises on byte sequences that become invalid late.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []  # ids of the last piece, then those without emitted text
        self._num_emitted = 0  # ids of the window whose text was emitted
        self._emitted = ""  # their text
        shown = next((token_id for token_id in reversed(context) if token_id not in self._hidden), None)
        if shown is not None:
            self.continue_after(shown)

    @property
    def is_at_start(self) -> bool:
        """The text has no context, and no token came."""
        return not self._window

    def continue_after(self, token_id: int) -> None:
        """Decode what follows as the text after this token, which is not emitted."""
        self._window, self._num_emitted = [token_id], 1
        self._emitted = self._decode(self._window)

    def push(self, token_ids: Sequence[int]) -> str:
        num_before = len(self._window)
        self._window.extend(token_id for token_id in token_ids if token_id not in self._hidden)
        if len(self._window) == num_before:
            return ""
        text = self._decode(self._window)
        is_incomplete = text.endswith(_REPLACEMENT) or len(text) <= len(self._emitted)
        if is_incomplete and len(self._window) - self._num_emitted <= _MAX_HELD_TOKENS:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decode(self._window))

    def _emit(self, text: str) -> str:
        new = text[len(self._emitted) :]
        if len(self._window) > self._num_emitted:
            self._window = self._window[self._num_emitted :]
        self._num_emitted = len(self._window)
        self._emitted = self._decode(self._window)
        return new

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class ByteFallbackDecoder:
    """Decoder for tokenizers with a token for each byte, for characters that the vocabulary lacks.

    Byte tokens are decoded here; the others by a window.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._byte_of = tokenizer.fallback_bytes
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._others = WindowDecoder(tokenizer, context, skip_special_tokens=skip_special_tokens)

    def push(self, token_ids: Sequence[int]) -> str:
        shown = [token_id for token_id in token_ids if token_id not in self._hidden]
        runs = groupby(shown, self._byte_of.__contains__)
        return "".join(
            self._push_bytes(list(run)) if is_bytes else self._push_others(list(run))
            for is_bytes, run in runs
        )

    def flush(self) -> str:
        return self._others.flush() + self._characters.decode(b"", final=True)

    def _push_bytes(self, token_ids: list[int]) -> str:
        content = bytes(map(self._byte_of.__getitem__, token_ids))
        if self._others.is_at_start and not self._tokenizer.decode(token_ids[:1]):
            content = content[1:]  # the space at the beginning of a text, which the tokenizer leaves out
        before = self._others.flush()
        self._others.continue_after(token_ids[-1])
        return before + self._characters.decode(content)

    def _push_others(self, token_ids: list[int]) -> str:
        return self._characters.decode(b"", final=True) + self._others.push(token_ids)
