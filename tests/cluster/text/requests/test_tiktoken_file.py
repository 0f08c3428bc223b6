"""Tokenizers in tiktoken's format, against its algorithm: merge the neighbors that form the token of lowest rank."""

from __future__ import annotations

import base64
import itertools
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.cluster.text.requests.detokenizer import incremental_decoder
from quire.cluster.text.requests.tokenizer import Tokenizer
from quire.proto.errors import ModelLoadError
from quire.proto.model.tiktoken_file import FORMATS
from quire.worker.structured.vocabulary import read_vocabulary

WORDS = (
    "the",
    " the",
    " quick",
    "ing",
    "qu",
    "ick",
    " 12",
    "123",
    "中文",
    "文",
    "é",
    "Don",
    "n't",
    " \n",
    "  ",
)
CONFIG: dict[str, Any] = {
    "tokenizer_class": "TikTokenTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_it.TikTokenTokenizer", None]},
    "bos_token": "[BOS]",
    "eos_token": {"content": "[EOS]"},
    "chat_template": "{{ messages[0].content }}",
}


def _ranks() -> dict[bytes, int]:
    """Return all bytes, and the beginnings and ends of the words, shorter ones first."""
    parts = {
        part
        for word in map(str.encode, WORDS)
        for end in range(2, len(word) + 1)
        for part in (word[:end], word[-end:])
    }
    tokens = [bytes([byte]) for byte in range(256)] + sorted(parts, key=lambda part: (len(part), part))
    return {token: rank for rank, token in enumerate(tokens)}


RANKS = _ranks()
FIRST = len(RANKS)


def write(folder: Path, name: str, **config: Any) -> Path:
    """Write a tokenizer of a class of FORMATS."""
    lines = (f"{base64.b64encode(token).decode()} {rank}" for token, rank in RANKS.items())
    (folder / FORMATS[name].file).write_text("\n".join(lines) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG | {"tokenizer_class": name} | config))
    (folder / "config.json").write_text(json.dumps({"model_type": "it"}))
    return folder


@pytest.fixture(scope="module", params=FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def tokenizer(name: str, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(str(write(tmp_path_factory.mktemp("tokenizer"), name)))


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    added = {
        str(FIRST): {"content": "[BOS]", "special": True},
        str(FIRST + 1): {"content": "[EOS]", "special": True},
        str(FIRST + 5): {"content": "<|tool_call_begin|>", "special": False},
    }
    return write(tmp_path_factory.mktemp("kimi"), "TikTokenTokenizer", added_tokens_decoder=added)


def pieces_of(name: str, text: str) -> list[str]:
    found: list[str] = regex.findall(FORMATS[name].pattern, text, flags=regex.VERSION1)
    return found


def expected_ids(name: str, text: str) -> list[int]:
    """Return the ids by tiktoken's algorithm."""
    ids: list[int] = []
    for piece in pieces_of(name, text):
        is_token = piece.encode() in RANKS
        parts = [piece.encode()] if is_token else [bytes([byte]) for byte in piece.encode()]
        while True:
            ranks = [RANKS.get(left + right) for left, right in itertools.pairwise(parts)]
            known = [(rank, index) for index, rank in enumerate(ranks) if rank is not None]
            if not known:
                break
            _, index = min(known)
            parts[index : index + 2] = [parts[index] + parts[index + 1]]
        ids += (RANKS[part] for part in parts)
    return ids


pieces = st.one_of(st.sampled_from(WORDS), st.text(max_size=4))


@settings(suppress_health_check=list(HealthCheck), max_examples=200)
@given(st.lists(pieces, max_size=8).map("".join))
def test_ids_equal_those_of_the_algorithm(name: str, tokenizer: Tokenizer, text: str) -> None:
    if FORMATS[name].is_normalized:
        text = unicodedata.normalize("NFC", text)
    ids = tokenizer.encode(text)
    assert ids == expected_ids(name, text)
    assert tokenizer.decode(ids) == text


def test_hunyuan_composes_characters(tmp_path: Path) -> None:
    tokenizer = Tokenizer(str(write(tmp_path, "HYTokenizer")))
    assert tokenizer.encode("e\N{COMBINING ACUTE ACCENT}") == [RANKS["é".encode()]]
    assert tokenizer.encode("<|bos|>the<|extra_204|>") == [FIRST + 2, RANKS[b"the"], FIRST + 209]


def test_kimi_splits_han_from_other_letters_and_numbers_by_three() -> None:
    assert pieces_of("TikTokenTokenizer", "中文English混合 1234") == [
        "中文",
        "English",
        "混合",
        " ",
        "123",
        "4",
    ]
    assert pieces_of("HYTokenizer", "中文English混合 12") == ["中文English混合", " ", "1", "2"]


def test_added_tokens_have_the_ids_of_the_configuration(kimi: Path) -> None:
    tokenizer = Tokenizer(str(kimi))
    assert tokenizer.encode("[BOS]the<|tool_call_begin|>") == [FIRST, RANKS[b"the"], FIRST + 5]
    assert tokenizer.decode([FIRST, FIRST + 5, FIRST + 255]) == "<|tool_call_begin|>"
    assert tokenizer.token_text(FIRST + 255) == f"<|reserved_token_{FIRST + 255}|>"
    assert tokenizer.named_special_tokens["eos_token"] == "[EOS]"
    assert tokenizer.chat_template() == CONFIG["chat_template"]


def test_text_is_decoded_as_it_comes(tokenizer: Tokenizer) -> None:
    assert tokenizer.is_byte_level
    decoder = incremental_decoder(tokenizer)
    assert "".join(decoder.push([byte]) for byte in "é中".encode()) + decoder.flush() == "é中"


def test_constraints_have_the_bytes_of_the_tokens(kimi: Path) -> None:
    vocabulary = read_vocabulary(str(kimi), FIRST + 256, (FIRST + 1,))
    assert vocabulary.pieces[: len(RANKS)] == list(RANKS)
    assert {FIRST, FIRST + 1} <= vocabulary.special_ids
    assert FIRST + 5 not in vocabulary.special_ids


def test_code_of_other_classes_is_not_run(kimi: Path, tmp_path: Path) -> None:
    write(tmp_path, "TikTokenTokenizer", tokenizer_class="OtherTokenizer")
    (tmp_path / "tokenization_it.py").write_text("raise SystemExit")
    with pytest.raises(ModelLoadError, match="the tokenizer cannot be read"):
        Tokenizer(str(tmp_path))


def test_damaged_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, "TikTokenTokenizer")
    (tmp_path / "tiktoken.model").write_text("dGhl 7\n")
    with pytest.raises(ModelLoadError, match="ids are not 0 to 0"):
        Tokenizer(str(tmp_path))
