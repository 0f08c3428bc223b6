"""Tokenizer and PromptEncoder. Only gateways, LLM and clients see text; the rest of quire uses token ids."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ....proto.block_tables import IntArray
from ....proto.config import ModelConfig
from ....proto.errors import InvalidRequest, ModelLoadError, first_line
from ....proto.model.tiktoken_file import (
    TiktokenFormat,
    find_format,
    load_tiktoken,
    read_tokenizer_config,
)
from ....proto.model.transformers_spec import import_transformers
from .chat_template import Rendering, render

# Limit for a rendered prompt.
MAX_PROMPT_CHARS = 4 << 20
# Characters of a rendered prompt that tell the state in which it leaves the model.
END_CHARS = 1024


class Tokenizer:
    """The tokenizer of a model directory. Threads may share one.

    Attributes:
        special_tokens: texts of the special tokens.
        special_ids: their ids.
        is_byte_level: each token stands for bytes, whatever its neighbors are.
        token_bytes: their bytes, if the tokenizer `is_byte_level`.
        shown_bytes: the same, without the bytes of special tokens.
        fallback_bytes: id |-> byte, of the tokens that stand for one byte of a character that the vocabulary lacks.
        named_special_tokens: name |-> text of those with a role, for example ``bos_token``.

    Raises:
        ModelLoadError: the directory has no tokenizer that can be read.
    """

    def __init__(self, path: str) -> None:
        self._loaded = self._load(path)
        self._backend = self._loaded.backend_tokenizer
        self.named_special_tokens: dict[str, str] = dict(self._loaded.special_tokens_map)
        special = {
            token_id: token.content
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        }
        self.special_ids = frozenset(special)
        self.special_tokens = frozenset(special.values())
        self.is_byte_level = type(self._backend.decoder).__name__ == "ByteLevel"
        # Bounded by the vocabulary: ids without a token are not sampled, and are refused in prompts.
        self.token_bytes = TokenBytes(self._backend.id_to_token)
        self.shown_bytes = TokenBytes(self._backend.id_to_token, self.special_tokens)
        self.fallback_bytes = (
            _fallback_bytes(self._backend) if _has_byte_fallback(self._backend.decoder) else {}
        )
        # These settings are for training. A prompt that is too long must be refused, not truncated.
        self._backend.no_truncation()
        self._backend.no_padding()

    def _load(self, path: str) -> Any:
        loaded = _load(path)
        backend = loaded.backend_tokenizer
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        if not backend.get_vocab().keys() - added - set(loaded.all_special_tokens):
            raise ModelLoadError(f"{path}: the tokenizer has no tokens; its vocabulary may be missing")
        return loaded

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
            not self.is_byte_level
            or self._backend.normalizer is not None
            or any(token.lstrip or token.rstrip for token in added)  # such tokens absorb white space
        ):
            return None
        return max(map(len, self._backend.get_vocab()))

    @functools.cached_property
    def num_end_tokens(self) -> int:
        """Special tokens that the tokenizer adds after a text."""
        text = self.encode("a", add_special_tokens=False)
        whole = self.encode("a")
        starts = [start for start in range(len(whole)) if whole[start : start + len(text)] == text]
        return len(whole) - starts[-1] - len(text) if starts else 0

    def encode(self, text: str, *, add_special_tokens: bool = True, pair: str | None = None) -> list[int]:
        """Return the ids of a text, by default with the special tokens that the model's tokenizer adds.

        Args:
            pair: a second text, which the tokenizer joins with the first as it does for pairs.

        Raises:
            InvalidRequest: the model's tokenizer fails on the text.
        """
        try:
            ids: list[int] = self._backend.encode(text, pair, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            # Rust's panics are no Exception. The tokenizer's regular expressions panic on texts that make them
            # backtrack for long. Its errors are plain Exceptions, for example without a token for unknown words.
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise
            raise InvalidRequest("prompt", f"cannot be tokenized: {first_line(error)}") from error
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def added_tokens(self) -> dict[str, int]:
        """Return text |-> id of the tokens that were added to the vocabulary, special or not."""
        return {
            token.content: token_id for token_id, token in self._backend.get_added_tokens_decoder().items()
        }

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


class NoTokenizer(Tokenizer):
    """The tokenizer of an engine that serves token ids alone: it refuses texts, and shows ids as ``token_id:7``."""

    def __init__(self) -> None:
        super().__init__("")

    def _load(self, path: str) -> Any:
        from tokenizers import Tokenizer as Backend
        from tokenizers import models

        return import_transformers().PreTrainedTokenizerFast(tokenizer_object=Backend(models.BPE()))

    def encode(self, text: str, *, add_special_tokens: bool = True, pair: str | None = None) -> list[int]:
        """Raises InvalidRequest."""
        raise no_text("prompt")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Raises InvalidRequest."""
        raise no_text("tokens")

    def token_text(self, token_id: int) -> str:
        """Return the id as text."""
        return f"token_id:{token_id}"


def no_text(field: str) -> InvalidRequest:
    """Return the error of a field that needs a tokenizer."""
    return InvalidRequest(
        field, "needs a tokenizer, and the server runs with skip_tokenizer_init; use token ids"
    )


def load_tokenizer(model: ModelConfig) -> Tokenizer:
    """Return the tokenizer of a model. Raises ModelLoadError as Tokenizer does."""
    return NoTokenizer() if model.skip_tokenizer_init else Tokenizer(model.path)


def _has_byte_fallback(decoder: Any) -> bool:
    """Return whether a decoder of the library `tokenizers` joins byte tokens to characters."""
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    return any(each["type"] == "ByteFallback" for each in state.get("decoders", [state]))


def _fallback_bytes(backend: Any) -> dict[int, int]:
    """Return id |-> byte of the tokens from <0x00> to <0xFF>, as far as the vocabulary has them."""
    ids = {byte: backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    return {token_id: byte for byte, token_id in ids.items() if token_id is not None}


def _load(path: str) -> Any:
    """Return transformers' tokenizer of a model directory."""
    try:
        if (tiktoken := find_format(Path(path))) is not None:
            return _load_tiktoken(Path(path), tiktoken)
        loaded = import_transformers().AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
        _ = loaded.backend_tokenizer
    except Exception as error:  # transformers passes on the exceptions of its parsers
        raise ModelLoadError(f"{path}: the tokenizer cannot be read: {first_line(error)}") from error
    return loaded


def _load_tiktoken(folder: Path, tiktoken: TiktokenFormat) -> Any:
    """Return transformers' class with a tokenizer in tiktoken's format."""
    config, template = read_tokenizer_config(folder), folder / "chat_template.jinja"
    named = {
        name: text["content"] if isinstance(text, dict) else text
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := config.get(name))
    }
    return import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=load_tiktoken(folder, tiktoken),
        chat_template=template.read_text(encoding="utf-8")
        if template.is_file()
        else config.get("chat_template"),
        **named,
    )


def _bytes_of_characters() -> dict[str, int]:
    """Return character of a byte-level token |-> byte: visible characters of Latin-1 stand for themselves."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF = _bytes_of_characters()


class TokenBytes(dict[int, bytes]):
    """token id |-> its bytes; those of an id outside the vocabulary are none. Filled as ids come.

    Args:
        token_of: returns the token of an id, None for an id without one.
        hidden: tokens without bytes.
    """

    def __init__(self, token_of: Callable[[int], str | None], hidden: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._token_of = token_of
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        if token is None or token in self._hidden:
            found = b""
        else:
            try:
                found = bytes(map(_BYTE_OF.__getitem__, token))
            except KeyError:  # an added token is its own text
                found = token.encode()
        self[token_id] = found
        return found


class PromptEncoder(Protocol):
    """Tokenizes prompts. Threads may share one."""

    def encode_text(self, text: str, *, add_special_tokens: bool, pair: str | None = None) -> IntArray:
        """Return the token ids of a text, or of two texts as the model's tokenizer joins them."""
        ...

    def encode_chat(self, rendering: Rendering) -> tuple[IntArray, str]:
        """Return the token ids of a rendered conversation, and the end of its text.

        Raises:
            TemplateError: the template cannot be rendered.
        """
        ...


class LocalPromptEncoder:
    """Tokenizes in the thread of the caller, without limits of time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode_text(self, text: str, *, add_special_tokens: bool, pair: str | None = None) -> IntArray:
        token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, pair=pair)
        return np.asarray(token_ids, dtype=np.int32)

    def encode_chat(self, rendering: Rendering) -> tuple[IntArray, str]:
        text = render(rendering, MAX_PROMPT_CHARS)
        return self.encode_text(text, add_special_tokens=False), text[-END_CHARS:]
