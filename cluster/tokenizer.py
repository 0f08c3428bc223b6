"""Text to token ids and back. The core speaks ids; only the edge comes here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..proto.errors import ModelLoadError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Far more than a character has; ids that never become one (a model can sample anything) must not pile up.
_MAX_HELD_TOKENS = 32


class Tokenizer:
    """The model's own tokenizer. Threads may share one.

    Raises:
        ModelLoadError: the directory holds none that can be read.
    """

    def __init__(self, path: str) -> None:
        self._backend = _load_backend(path)

    def encode(self, text: str) -> list[int]:
        """The text's ids, with the special tokens that the model's own rule adds."""
        ids: list[int] = self._backend.encode(text).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The ids' text, special tokens left out."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=True)
        return text

    def token_text(self, token_id: int) -> str:
        """One token's text by itself, special tokens included."""
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text


class IncrementalDecoder:
    """One sequence's text as its ids come: the pieces joined are `Tokenizer.decode` of all ids.

    Decodes a short window twice and keeps what is new, since a token's text depends on its neighbours (Hugging
    Face's text-generation-inference does the same). Text that ends inside a character is held back. tokenizers'
    DecodeStream has no way to say what it still holds, and raises on byte sequences that turn invalid late.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # ids from the last two pieces on
        self._num_told = 0  # of the window, those whose text was given away
        self._told = ""  # their text

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete; may be empty."""
        self._window.extend(token_ids)
        text = self._tokenizer.decode(self._window)
        is_open = text.endswith(_REPLACEMENT) or len(text) <= len(self._told)
        if is_open and len(self._window) - self._num_told <= _MAX_HELD_TOKENS:
            return ""
        return self._tell(text)

    def flush(self) -> str:
        """What was held back, an incomplete character as U+FFFD."""
        return self._tell(self._tokenizer.decode(self._window))

    def _tell(self, text: str) -> str:
        new = text[len(self._told) :]
        self._window = self._window[self._num_told :]
        self._num_told = len(self._window)
        self._told = self._tokenizer.decode(self._window)
        return new


def _load_backend(path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        backend = loaded.backend_tokenizer
    except Exception as error:  # transformers raises whatever its parsers do
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(f"{path}: the tokenizer cannot be read: {reason}") from error
    # Truncation and padding belong to training; a prompt is refused when it is too long, never cut.
    backend.no_truncation()
    backend.no_padding()
    return backend
