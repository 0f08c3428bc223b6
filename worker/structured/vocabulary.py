"""Vocabulary: the bytes that each token stands for. Compilers and ranks read it in the same way."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...proto.errors import ConfigError, first_line
from ...proto.model.tiktoken_file import byte_alphabet, find_format, load_tiktoken, read_tokenizer_config
from ...proto.model.transformers_spec import import_transformers

_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model.

    Attributes:
        pieces: [V] bytes of each token; empty where the tokenizer has no token. Special tokens have the bytes of
            their names.
        special_ids: tokens that stand for no text.
        stop_ids: the model's end-of-sequence tokens.
        encode: text |-> token ids, as the tokenizer splits it.
    """

    pieces: list[bytes]
    special_ids: frozenset[int]
    stop_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]

    def __len__(self) -> int:
        return len(self.pieces)

    @functools.cached_property
    def text_pieces(self) -> list[bytes]:
        """As `pieces`, empty for special tokens."""
        return [b"" if index in self.special_ids else piece for index, piece in enumerate(self.pieces)]

    @functools.cached_property
    def special_by_text(self) -> Mapping[str, int]:
        """Text of a special token |-> its id."""
        return {self.pieces[index].decode(): index for index in sorted(self.special_ids)}

    @functools.cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """Matches the text of a special token, as a group; None without any."""
        names = sorted(filter(None, self.special_by_text), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    @functools.cached_property
    def id_by_piece(self) -> Mapping[bytes, int]:
        """Bytes |-> the first token that stands for them."""
        found: dict[bytes, int] = {}
        for index, piece in enumerate(self.pieces):
            found.setdefault(piece, index)
        return found


def read_vocabulary(path: str, vocab_size: int, stop_ids: tuple[int, ...]) -> Vocabulary:
    """Return the vocabulary of a model directory.

    Args:
        vocab_size: number of logits, which may differ from the number of tokens.

    Raises:
        ConfigError: the tokenizer does not show which bytes its tokens stand for.
    """
    backend, special_texts = _read_tokenizer(Path(path))
    backend.encode_special_tokens = True  # a text with the name of a special token is text
    to_bytes = _converter(backend)
    added = backend.get_added_tokens_decoder()
    pieces = [b""] * vocab_size
    for text, index in backend.get_vocab(with_added_tokens=True).items():
        if index < vocab_size:
            pieces[index] = text.encode() if index in added else to_bytes(text)
    special_ids = {
        index
        for index, token in added.items()
        if (token.special or token.content in special_texts) and index < vocab_size
    }
    return Vocabulary(
        pieces,
        frozenset(special_ids | {index for index in stop_ids if index < vocab_size}),
        stop_ids,
        lambda text: list(backend.encode(text, add_special_tokens=False).ids),
    )


def _read_tokenizer(folder: Path) -> tuple[Any, frozenset[str]]:
    """Return the tokenizer of the library tokenizers, and texts of special tokens that it may not know as special.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        if (found := read_without_transformers(folder)) is not None:
            return found
        whole = import_transformers().AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
        return whole.backend_tokenizer, frozenset()
    except Exception as error:  # both libraries pass on the exceptions of their parsers
        raise ConfigError(f"{folder}: the tokenizer cannot be read: {first_line(error)}") from error


def read_without_transformers(folder: Path) -> tuple[Any, frozenset[str]] | None:
    """Return the same. Returns None if transformers must convert the files or add tokens to them.

    The import of transformers takes 1 s, and 5 s on a busy machine, which is as long as a rank may be late: the first
    constraint failed the ranks.
    """
    from tokenizers import Tokenizer

    if (tiktoken := find_format(folder)) is not None:
        return load_tiktoken(folder, tiktoken), frozenset()
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(file))
    config = read_tokenizer_config(folder)
    stated = {each["content"] for each in config.get("added_tokens_decoder", {}).values()}
    special_texts = _special_texts(config)
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    return (tokenizer, special_texts) if stated | special_texts <= added else None


def _special_texts(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the texts of special tokens that tokenizer_config.json names."""
    named = [value for name, value in config.items() if name.endswith("_token")]
    for more in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(more) or []
        named += value.values() if isinstance(value, dict) else value
    named += [each for each in config.get("added_tokens_decoder", {}).values() if each.get("special")]
    texts = (each["content"] if isinstance(each, dict) else each for each in named)
    return frozenset(text for text in texts if isinstance(text, str))


def _converter(backend: Any) -> Callable[[str], bytes]:
    """Return token |-> bytes for the tokenizer's decoder."""
    kinds = _decoder_kinds(json.loads(backend.decoder.__getstate__()) if backend.decoder else {})
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"ByteFallback", "Metaspace"}:
        return _byte_fallback
    shown = ", ".join(sorted(kinds)) or "none"
    raise ConfigError(
        f"structured outputs need a byte-level tokenizer or one with bytes; its decoder is {shown}"
    )


def _decoder_kinds(decoder: Mapping[str, Any]) -> set[str]:
    kinds = {str(decoder["type"])} if "type" in decoder else set()
    for part in decoder.get("decoders", ()):
        kinds |= _decoder_kinds(part)
    return kinds


def _byte_level(token: str) -> bytes:
    """Return the bytes of a token of GPT-2's alphabet, in which each character stands for one byte."""
    alphabet = _byte_alphabet()
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()


@functools.cache
def _byte_alphabet() -> Mapping[str, int]:
    return {character: byte for byte, character in byte_alphabet().items()}


def _byte_fallback(token: str) -> bytes:
    """Return the bytes of a token of SentencePiece: ``<0x0A>`` is a byte, and a mark stands for a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(_SPACE_MARK, " ").encode()
