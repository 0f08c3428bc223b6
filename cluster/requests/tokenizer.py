"""Text to token ids and back. The core speaks ids; only the edge comes here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...proto.errors import InvalidRequest, ModelLoadError, first_line
from .chat import MAX_CHAT_CHARS, Chat

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Far more than a character has; ids that never become one (a model can sample anything) must not pile up.
_MAX_HELD_TOKENS = 32


class Tokenizer:
    """The model's own tokenizer. Threads may share one.

    Raises:
        ModelLoadError: the directory holds none that can be read.
    """

    def __init__(self, path: str) -> None:
        self._loaded = _load(path)
        self._backend = self._loaded.backend_tokenizer
        # Truncation and padding belong to training; a prompt is refused when it is too long, never cut.
        self._backend.no_truncation()
        self._backend.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The text's ids; unless told otherwise with the special tokens that the model's own rule adds."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The ids' text."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def encode_chat(self, chat: Chat) -> list[int]:
        """A conversation's ids, as the model's own template writes it, special tokens included.

        The template runs in transformers' sandbox, which lets it read what it is given and change nothing.

        Raises:
            InvalidRequest: it is no conversation, the model has no template, or the template refuses it.
        """
        chat.check()
        if self._loaded.chat_template is None:
            raise InvalidRequest(
                "chat", "cannot be answered: the model has no chat template; send text or token ids"
            )
        try:
            text: str = self._loaded.apply_chat_template(
                [dict(message) for message in chat.messages],
                tokenize=False,
                add_generation_prompt=not chat.continue_final_message,
                continue_final_message=chat.continue_final_message,
                **chat.template_options,
            )
        except Exception as error:  # whatever the template raises, or does not take
            raise InvalidRequest("chat", f"the model's template refuses it: {first_line(error)}") from error
        if len(text) > MAX_CHAT_CHARS:
            problem = f"the model's template makes {len(text)} characters of it, at most {MAX_CHAT_CHARS} are allowed"
            raise InvalidRequest("chat", problem)
        return self.encode(text, add_special_tokens=False)

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """The ids of a word inside a text: at the beginning, and after a space.

        A spelling that ends with another is left out: who forbids the shorter one forbids it as well.
        """
        ids = [tuple(self.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")]
        found = sorted({spelling for spelling in ids if spelling}, key=len)
        return [
            spelling
            for index, spelling in enumerate(found)
            if not any(spelling[-len(shorter) :] == shorter for shorter in found[:index])
        ]

    def token_text(self, token_id: int) -> str:
        """One token's text by itself, special tokens included."""
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text


class IncrementalDecoder:
    """One sequence's text as its ids come: the pieces joined are `Tokenizer.decode` of all ids.

    Args:
        skip_special_tokens: leave out the text of special tokens.

    Decodes a short window twice and keeps what is new, since a token's text depends on its neighbours (Hugging
    Face's text-generation-inference does the same). Text that ends inside a character is held back. tokenizers'
    DecodeStream has no way to say what it still holds, and raises on byte sequences that turn invalid late.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # ids from the last two pieces on
        self._num_told = 0  # of the window, those whose text was given away
        self._told = ""  # their text

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete; may be empty."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        is_open = text.endswith(_REPLACEMENT) or len(text) <= len(self._told)
        if is_open and len(self._window) - self._num_told <= _MAX_HELD_TOKENS:
            return ""
        return self._tell(text)

    def flush(self) -> str:
        """What was held back, an incomplete character as U+FFFD."""
        return self._tell(self._decode(self._window))

    def _tell(self, text: str) -> str:
        new = text[len(self._told) :]
        self._window = self._window[self._num_told :]
        self._num_told = len(self._window)
        self._told = self._decode(self._window)
        return new

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _load(path: str) -> Any:
    """The directory's tokenizer, as transformers makes it."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        _ = loaded.backend_tokenizer
    except Exception as error:  # transformers raises whatever its parsers do
        raise ModelLoadError(f"{path}: the tokenizer cannot be read: {first_line(error)}") from error
    return loaded
