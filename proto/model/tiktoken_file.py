"""Tokenizers in tiktoken's format, as published for Kimi K2 and Hunyuan: tokens by rank, and no tokenizer.json.

The repositories come with code that reads the file. It is not run: what it does is known by its class's name.
"""

from __future__ import annotations

import base64
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class TiktokenFormat:
    """Knowledge of a tokenizer that is only in the code of its class.

    Attributes:
        file: base64 of each token, and its rank, which is its id.
        pattern: regular expression of the pieces of a text that are tokenized apart.
        num_added: ids after those of the file.
        added: texts of the first of these; those that tokenizer_config.json does not name either are reserved.
        is_normalized: texts are brought into Unicode's form NFC.
    """

    file: str
    pattern: str
    num_added: int
    added: tuple[str, ...] = ()
    is_normalized: bool = False


_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_NO_WORDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Class in tokenizer_config.json |-> its format.
FORMATS = {
    "TikTokenTokenizer": TiktokenFormat(
        "tiktoken.model",
        r"[\p{Han}]+"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}?"
        r"|\p{N}{1,3}" + _NO_WORDS,
        num_added=256,
    ),
    "HYTokenizer": TiktokenFormat(
        "hy.tiktoken",
        _ENDING + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _NO_WORDS,
        num_added=210,
        added=(
            *("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>"),
            *(f"<|extra_{index}|>" for index in range(205)),
        ),
        is_normalized=True,
    ),
}


def find_format(folder: Path) -> TiktokenFormat | None:
    """Return the format of a model directory. Returns None unless its only tokenizer is of a known class."""
    if (folder / "tokenizer.json").is_file():
        return None
    found = FORMATS.get(str(read_tokenizer_config(folder).get("tokenizer_class")))
    return found if found is not None and (folder / found.file).is_file() else None


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json; empty if there is none. Raises OSError, ValueError."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_bytes()) if path.is_file() else {}
    return config if isinstance(config, dict) else {}


def load_tiktoken(folder: Path, found: TiktokenFormat) -> Any:
    """Return the tokenizer of a model directory, of the library tokenizers.

    Raises:
        OSError, ValueError, KeyError: a file cannot be read.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    ranks = _read_ranks(folder / found.file)
    vocab = {_as_text(token): rank for token, rank in ranks.items()}
    # A whole piece that is a token is not merged from others.
    backend = Tokenizer(models.BPE(vocab=vocab, merges=_merges(ranks), ignore_merges=True))
    if found.is_normalized:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(found.pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    named = read_tokenizer_config(folder).get("added_tokens_decoder") or {}
    ids = range(len(ranks), len(ranks) + found.num_added)
    texts = dict(zip(ids, found.added, strict=False))
    backend.add_tokens(
        [
            AddedToken(
                named.get(str(token_id), {}).get("content")
                or texts.get(token_id, f"<|reserved_token_{token_id}|>"),
                special=bool(named.get(str(token_id), {}).get("special", True)),
                normalized=False,
            )
            for token_id in ids
        ]
    )
    return backend


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Return token |-> id: the lines of the file. Raises ValueError unless the ids are 0, 1 and so on."""
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{path}: its ids are not 0 to {len(ranks) - 1}")
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that are a token together, by its rank: the order in which tiktoken merges them."""
    merges: list[tuple[bytes, bytes]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:end], token[end:]) for end in range(1, len(token)))
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return [(_as_text(left), _as_text(right)) for left, right in merges]


@functools.cache
def byte_alphabet() -> dict[int, str]:
    """Return byte |-> character that stands for it in byte-level vocabularies (GPT-2's alphabet).

    Printable characters of Latin-1 stand for themselves, those from 256 on for the others.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def _as_text(token: bytes) -> str:
    return "".join(map(byte_alphabet().__getitem__, token))
