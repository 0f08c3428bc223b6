"""Tokenizer and incremental decoding. Only gateways, LLM and clients see text; the rest of quire uses token ids."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from ...proto.errors import InvalidRequest, ModelLoadError, first_line

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Far more than one character has. Bounds the tokens held back if the model samples ids that never form a character.
_MAX_HELD_TOKENS = 32


class Tokenizer:
    """The tokenizer of a model directory. Threads may share one.

    Attributes:
        special_tokens: texts of the special tokens.
        named_special_tokens: name |-> text of those with a role, for example ``bos_token``.

    Raises:
        ModelLoadError: the directory has no tokenizer that can be read.
    """

    def __init__(self, path: str) -> None:
        self._loaded = _load(path)
        self._backend = self._loaded.backend_tokenizer
        self.named_special_tokens: dict[str, str] = dict(self._loaded.special_tokens_map)
        self.special_tokens = frozenset(
            token.content for token in self._backend.get_added_tokens_decoder().values() if token.special
        )
        # These settings are for training. A prompt that is too long must be refused, not truncated.
        self._backend.no_truncation()
        self._backend.no_padding()

    @property
    def transformers_tokenizer(self) -> Any:
        """The tokenizer as transformers loaded it."""
        return self._loaded

    def to_json(self) -> str:
        """Return the tokenizer as the text from which the library `tokenizers` loads an equal one."""
        return str(self._backend.to_str())

    def max_chars(self, num_tokens: int) -> int | None:
        """Return how many characters of text this many tokens can stand for at most; None if that is not known."""
        return None if self._max_token_chars is None else num_tokens * self._max_token_chars

    @functools.cached_property
    def _max_token_chars(self) -> int | None:
        """Longest token of a byte-level vocabulary, whose tokens have at least one byte per character."""
        added = self._backend.get_added_tokens_decoder().values()
        if (
            type(self._backend.decoder).__name__ != "ByteLevel"
            or self._backend.normalizer is not None
            or any(token.lstrip or token.rstrip for token in added)  # such tokens absorb white space
        ):
            return None
        return max(map(len, self._backend.get_vocab()))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, by default with the special tokens that the model's tokenizer adds.

        Raises:
            InvalidRequest: the model's tokenizer fails on the text.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            # Rust's panics are no Exception. The tokenizer's regular expressions panic on texts that make them
            # backtrack for long.
            if type(error).__name__ != "PanicException":
                raise
            raise InvalidRequest("prompt", f"cannot be tokenized: {first_line(error)}") from error
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def chat_template(self, *, for_tools: bool = False) -> str | None:
        """Return the source of the model's chat template, of several the one for tools if that is asked for."""
        templates = self._loaded.chat_template
        if not isinstance(templates, Mapping):
            return None if templates is None else str(templates)
        if for_tools and "tool_use" in templates:
            return str(templates["tool_use"])
        return str(templates["default"]) if "default" in templates else None

    def word_token_ids(self, word: str) -> list[tuple[int, ...]]:
        """Return the tokenizations of a word inside a text: at the beginning, and after a space.

        A tokenization that ends with a shorter one is left out: forbidding the shorter one forbids both.
        """
        ids = [tuple(self.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")]
        found = sorted({token_ids for token_ids in ids if token_ids}, key=len)
        return [
            token_ids
            for index, token_ids in enumerate(found)
            if not any(token_ids[-len(shorter) :] == shorter for shorter in found[:index])
        ]

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token, special tokens included."""
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text


class IncrementalDecoder:
    """Decodes one sequence incrementally: the pieces joined equal `Tokenizer.decode` of all ids.

    Args:
        skip_special_tokens: leave out the text of special tokens.

    A token's text depends on its neighbors. So each call decodes a short window with and without the new tokens, and
    returns the difference, as Hugging Face's text-generation-inference does. Text that ends inside a character is
    held back. tokenizers' DecodeStream cannot report the text that it holds back, and raises on byte sequences that
    become invalid late.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # ids of the last piece, then those without emitted text
        self._num_emitted = 0  # ids of the window whose text was emitted
        self._emitted = ""  # their text

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids complete; may be empty."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        is_incomplete = text.endswith(_REPLACEMENT) or len(text) <= len(self._emitted)
        if is_incomplete and len(self._window) - self._num_emitted <= _MAX_HELD_TOKENS:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """Return the text held back so far, with U+FFFD for an incomplete character."""
        return self._emit(self._decode(self._window))

    def _emit(self, text: str) -> str:
        new = text[len(self._emitted) :]
        self._window = self._window[self._num_emitted :]
        self._num_emitted = len(self._window)
        self._emitted = self._decode(self._window)
        return new

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _load(path: str) -> Any:
    """Return transformers' tokenizer of a model directory."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        _ = loaded.backend_tokenizer
    except Exception as error:  # transformers passes on the exceptions of its parsers
        raise ModelLoadError(f"{path}: the tokenizer cannot be read: {first_line(error)}") from error
    return loaded
