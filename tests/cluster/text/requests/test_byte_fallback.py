"""Text of tokenizers with byte fallback, as SentencePiece makes them, against transformers' decoding."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from byte_fallback import NUM_BYTES, SPECIAL, WORDS, save_byte_fallback_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire import SamplingParams
from quire.cluster.text.requests.chat import Chat
from quire.cluster.text.requests.chat_encoder import ChatEncoder
from quire.cluster.text.requests.detokenizer import (
    ByteFallbackDecoder,
    WindowDecoder,
    incremental_decoder,
)
from quire.cluster.text.requests.output_processor import OutputProcessor
from quire.cluster.text.requests.outputs import CompletionDelta
from quire.cluster.text.requests.request import Request
from quire.cluster.text.requests.sequence_update import SequenceUpdate
from quire.cluster.text.requests.tokenizer import LocalPromptEncoder, Tokenizer
from quire.proto.options.sections import ChatOptions
from quire.proto.stream import Finish, FinishReason

FIRST_BYTE = len(SPECIAL)
FIRST_WORD = FIRST_BYTE + NUM_BYTES
PLACEHOLDER = "\ue000"  # valid UTF-8, in no text of these tests

steady = settings(deadline=None, derandomize=True, max_examples=150, suppress_health_check=list(HealthCheck))

byte_ids = st.integers(0, NUM_BYTES - 1).map(FIRST_BYTE.__add__)
word_ids = st.integers(FIRST_WORD, FIRST_WORD + len(WORDS) - 1)
special_ids = st.integers(0, len(SPECIAL) - 1)
# Bytes of whole characters, which a tokenizer's vocabulary lacks, among arbitrary tokens.
characters = st.sampled_from("é😀你 A").map(lambda text: [FIRST_BYTE + byte for byte in text.encode()])
token_lists = st.lists(
    st.one_of(characters, st.lists(st.one_of(byte_ids, word_ids, special_ids), max_size=3)), max_size=16
).map(lambda parts: [token_id for part in parts for token_id in part])


@pytest.fixture(scope="module", params=[True, False], ids=["strips-space", "keeps-space"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_fallback_tokenizer(folder, strips_space=request.param)
    return Tokenizer(str(folder))


def is_byte(token_id: int) -> bool:
    return FIRST_BYTE <= token_id < FIRST_WORD


def expected_text(tokenizer: Tokenizer, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
    """Return transformers' text, but with the characters of byte runs that are not valid as a whole."""
    shown = [token_id for token_id in token_ids if not (skip_special_tokens and token_id < FIRST_BYTE)]
    valid: list[int] = []
    texts: list[str] = []
    for is_run, group in groupby(shown, is_byte):
        run = list(group)
        text = bytes(token_id - FIRST_BYTE for token_id in run).decode(errors="replace") if is_run else ""
        if is_run and text.encode() != bytes(token_id - FIRST_BYTE for token_id in run):
            texts.append(text)
            run = [FIRST_BYTE + byte for byte in PLACEHOLDER.encode()]
        valid += run
    decoded = decode(tokenizer, valid, skip_special_tokens=skip_special_tokens)
    if texts and decoded.startswith(PLACEHOLDER) and texts[0].startswith(" "):
        texts[0] = texts[0][len(" ") * (not decode(tokenizer, [FIRST_BYTE + ord(" ")])) :]
    for text in texts:
        decoded = decoded.replace(PLACEHOLDER, text, 1)
    return decoded


def decode(tokenizer: Tokenizer, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
    text = tokenizer.transformers_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    assert isinstance(text, str)
    return text


@steady
@given(token_lists, st.booleans(), st.data())
def test_joined_pieces_equal_transformers_text_up_to_invalid_byte_runs(
    tokenizer: Tokenizer, token_ids: list[int], skip_special_tokens: bool, data: st.DataObject
) -> None:
    decoder = incremental_decoder(tokenizer, skip_special_tokens=skip_special_tokens)
    assert isinstance(decoder, ByteFallbackDecoder)
    text, start = "", 0
    while start < len(token_ids):
        count = data.draw(st.integers(1, len(token_ids) - start))
        text += decoder.push(token_ids[start : start + count])
        start += count
    text += decoder.flush()
    assert text == expected_text(tokenizer, token_ids, skip_special_tokens=skip_special_tokens)


@steady
@given(st.lists(st.one_of(characters, st.lists(word_ids, max_size=3)), max_size=16))
def test_valid_text_equals_transformers(tokenizer: Tokenizer, parts: list[list[int]]) -> None:
    token_ids = [token_id for part in parts for token_id in part]
    decoder = incremental_decoder(tokenizer)
    text = "".join(decoder.push([token_id]) for token_id in token_ids) + decoder.flush()
    assert text == decode(tokenizer, token_ids)


@steady
@given(token_lists, token_lists)
def test_text_after_a_context_continues_it(
    tokenizer: Tokenizer, context: list[int], token_ids: list[int]
) -> None:
    """The space before the first word is part of a completion, so that it can be put behind its prompt."""
    context = [*context, FIRST_WORD + WORDS.index("a")]  # characters end with their context
    decoder = incremental_decoder(tokenizer, context)
    text = "".join(decoder.push([token_id]) for token_id in token_ids) + decoder.flush()
    assert expected_text(tokenizer, context) + text == expected_text(tokenizer, context + token_ids)


def test_characters_are_emitted_when_complete(tokenizer: Tokenizer) -> None:
    decoder = incremental_decoder(tokenizer)
    token_ids = [FIRST_BYTE + byte for byte in "😀é".encode()]
    assert [decoder.push([token_id]) for token_id in token_ids] == ["", "", "", "😀", "", "é"]


def test_cut_character_leaves_the_complete_ones(tokenizer: Tokenizer) -> None:
    """The end of an output at max_tokens: transformers shows five U+FFFD."""
    token_ids = [FIRST_BYTE + byte for byte in "你好".encode()[:5]]
    decoder = incremental_decoder(tokenizer)
    assert decoder.push(token_ids) + decoder.flush() == "你\ufffd"
    assert decode(tokenizer, token_ids) == "\ufffd" * 5


def test_many_hidden_tokens_keep_the_space_after_them(tokenizer: Tokenizer) -> None:
    cat = FIRST_WORD + WORDS.index("▁cat")
    token_ids = [cat, *[SPECIAL.index("</s>")] * 100, cat]
    for decoder in (incremental_decoder(tokenizer), WindowDecoder(tokenizer)):
        text = "".join(decoder.push([token_id]) for token_id in token_ids) + decoder.flush()
        assert text == decode(tokenizer, token_ids)


@pytest.mark.parametrize(("is_chat", "expected"), [(False, " sat"), (True, "sat")])
def test_completion_continues_its_prompt_and_a_message_begins_anew(
    tmp_path: Path, is_chat: bool, expected: str
) -> None:
    save_byte_fallback_tokenizer(tmp_path)
    tokenizer = Tokenizer(str(tmp_path))
    chat = Chat([{"role": "user", "content": "Where?"}])
    config = ChatOptions(chat_template="{{ messages[0].content }}")
    encoded = ChatEncoder(config, tokenizer, LocalPromptEncoder(tokenizer)).encode(chat)
    request = Request(
        "r",
        np.asarray(tokenizer.encode("the cat"), np.int32),
        SamplingParams(max_tokens=4),
        new_parser=encoded.new_parser if is_chat else None,
    )
    update = SequenceUpdate(tokenizer.encode("sat"), finish=Finish(0, FinishReason.LENGTH))
    (delta, _) = OutputProcessor(request, tokenizer).process(0, update)
    assert isinstance(delta, CompletionDelta)
    assert delta.text == expected
