"""Tokenizer and incremental decoding. Only gateways, LLM and clients see text; the rest of quire uses token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...proto.errors import InvalidRequest, ModelLoadError, first_line
from .chat import MAX_CHAT_CHARS, Chat

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Far more than one character has. Bounds the tokens held back if the model samples ids that never form a character.
_MAX_HELD_TOKENS = 32


class Tokenizer:
    """The tokenizer of a model directory. Threads may share one.

    Raises:
        ModelLoadError: the directory has no tokenizer that can be read.
    """

    def __init__(self, path: str) -> None:
        self._loaded = _load(path)
        self._backend = self._loaded.backend_tokenizer
        # These settings are for training. A prompt that is too long must be refused, not truncated.
        self._backend.no_truncation()
        self._backend.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, by default with the special tokens that the model's tokenizer adds."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def encode_chat(self, chat: Chat) -> list[int]:
        """Return the ids of a conversation, rendered by the model's chat template with its special tokens.

        The template runs in transformers' sandbox, where it can read its variables but change nothing.

        Raises:
            InvalidRequest: the conversation is invalid, the model has no template, or the template rejects it.
        """
        chat.check()
        if self._loaded.chat_template is None:
            raise InvalidRequest(
                "chat", "is not supported: the model has no chat template; send text or token ids"
            )
        try:
            text: str = self._loaded.apply_chat_template(
                [dict(message) for message in chat.messages],
                tokenize=False,
                add_generation_prompt=not chat.continue_final_message,
                continue_final_message=chat.continue_final_message,
                **chat.template_options,
            )
        except Exception as error:  # templates raise arbitrary exceptions
            raise InvalidRequest("chat", f"the model's template rejects it: {first_line(error)}") from error
        if len(text) > MAX_CHAT_CHARS:
            problem = (
                f"has {len(text)} characters as rendered by the template, must be at most {MAX_CHAT_CHARS}"
            )
            raise InvalidRequest("chat", problem)
        return self.encode(text, add_special_tokens=False)

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
