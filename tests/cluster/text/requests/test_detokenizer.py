"""Incremental text equals the text decoded at once, truncated at the first stop string."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import quire.cluster.cli.demo
from quire.cluster.text.requests.detokenizer import (
    ByteDecoder,
    Detokenizer,
    StopFinder,
    WindowDecoder,
    incremental_decoder,
)
from quire.cluster.text.requests.tokenizer import Tokenizer

VOCAB_SIZE = 3072
TEXT = "It was the café's naïve 😀 and it said: stop!"


Decoder = type[ByteDecoder] | type[WindowDecoder]
DECODERS: tuple[Decoder, ...] = (ByteDecoder, WindowDecoder)


@cache
def demo_tokenizer() -> Tokenizer:
    return Tokenizer(str(Path(quire.cluster.cli.demo.__file__).parent / "model"))


# Slow machines must not fail a test, and failures must be reproducible.
steady = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

token_lists = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)
# Words, so that stop strings are found; token_lists adds arbitrary ids, incomplete characters included.
texts = st.lists(st.sampled_from(["the ", "cat", " and", "é", "😀", "st", "op", "\n", "stop"]), max_size=12)
stops = st.lists(st.text("abcdehnopst é😀\n", min_size=1, max_size=5), min_size=1, max_size=4)


def first_stop(text: str, stop: tuple[str, ...], num_exempt: int = 0) -> tuple[str, str | None]:
    """Return the text before the stop string that is completed first, by checking every prefix of the text.

    Args:
        num_exempt: characters at the beginning of the text within which no stop string may end.
    """
    for end in range(num_exempt + 1, len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("kind", DECODERS)
@steady
@given(token_lists, st.booleans())
def test_joined_pieces_equal_the_decoded_sequence(
    kind: Decoder, token_ids: list[int], skip_special_tokens: bool
) -> None:
    decoder = kind(demo_tokenizer(), skip_special_tokens=skip_special_tokens)
    pieces = [decoder.push([token_id]) for token_id in token_ids]
    whole = demo_tokenizer().decode(token_ids, skip_special_tokens=skip_special_tokens)
    assert "".join(pieces) + decoder.flush() == whole


@pytest.mark.parametrize("kind", DECODERS)
@steady
@given(token_lists, st.data())
def test_text_does_not_depend_on_how_tokens_are_batched(
    kind: Decoder, token_ids: list[int], data: st.DataObject
) -> None:
    decoder, text, start = kind(demo_tokenizer()), "", 0
    while start < len(token_ids):
        count = data.draw(st.integers(1, len(token_ids) - start))
        text += decoder.push(token_ids[start : start + count])
        start += count
    assert text + decoder.flush() == demo_tokenizer().decode(token_ids)


@pytest.mark.parametrize("kind", DECODERS)
def test_character_is_emitted_when_complete(kind: Decoder) -> None:
    decoder = kind(demo_tokenizer())
    token_ids = demo_tokenizer().encode("😀")
    assert len(token_ids) > 1
    assert [decoder.push([token_id]) for token_id in token_ids] == [""] * (len(token_ids) - 1) + ["😀"]


def test_ids_that_never_form_text_are_bounded() -> None:
    """A model can sample any token: each push must stay cheap, and the text correct."""
    tokenizer = demo_tokenizer()
    half = tokenizer.encode("😀")[0]
    for token_id in (half, 0):  # a part of a character; the end-of-text token
        decoder = WindowDecoder(tokenizer)
        text = "".join(decoder.push([token_id]) for _ in range(500))
        assert len(decoder._window) < 100
        assert text + decoder.flush() == tokenizer.decode([token_id] * 500)


@settings(steady, max_examples=300)
@given(texts, token_lists, stops, st.data())
def test_text_is_truncated_before_the_first_stop_string(
    words: list[str], noise: list[int], stop: list[str], data: st.DataObject
) -> None:
    tokenizer, strings = demo_tokenizer(), tuple(stop)
    token_ids = tokenizer.encode("".join(words)) + noise
    expected, expected_stop = first_stop(tokenizer.decode(token_ids), strings)
    detokenizer, shown, num_used = Detokenizer(tokenizer, strings), "", 0
    while num_used < len(token_ids) and detokenizer.stop_string is None:
        count = data.draw(st.integers(1, len(token_ids) - num_used))
        text, num_tokens = detokenizer.push(token_ids[num_used : num_used + count])
        shown += text
        assert expected.startswith(shown), "text after the stop string was returned"
        num_used += num_tokens
    if detokenizer.stop_string is None:
        shown += detokenizer.finish()
    assert (shown, detokenizer.stop_string) == (expected, expected_stop)
    if expected_stop is not None and num_used < len(token_ids):
        complete, before = (tokenizer.decode(token_ids[:n]) for n in (num_used, num_used - 1))
        assert first_stop(complete, strings)[1] is not None, "ended before the stop string was complete"
        assert first_stop(before, strings)[1] is None, (
            "used tokens after the one that completed the stop string"
        )


@settings(steady, max_examples=300)
@given(texts, stops, st.integers(0, 12), st.data())
def test_no_stop_string_ends_within_the_minimum_of_tokens(
    words: list[str], stop: list[str], min_tokens: int, data: st.DataObject
) -> None:
    tokenizer, strings = demo_tokenizer(), tuple(stop)
    token_ids = tokenizer.encode("".join(words))
    decoder, whole = incremental_decoder(tokenizer), tokenizer.decode(token_ids)
    exempt = "".join(decoder.push([token_id]) for token_id in token_ids[:min_tokens])
    num_exempt = len(whole) if min_tokens > len(token_ids) else len(exempt)
    expected, expected_stop = first_stop(whole, strings, num_exempt)
    detokenizer, shown, num_used = Detokenizer(tokenizer, strings, min_tokens=min_tokens), "", 0
    while num_used < len(token_ids) and detokenizer.stop_string is None:
        count = data.draw(st.integers(1, len(token_ids) - num_used))
        text, num_tokens = detokenizer.push(token_ids[num_used : num_used + count])
        shown += text
        num_used += num_tokens
    if detokenizer.stop_string is None:
        shown += detokenizer.finish()
    assert (shown, detokenizer.stop_string) == (expected, expected_stop)


@steady
@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_only_a_possible_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    finder, shown = StopFinder(tuple(stop)), ""
    for character in text:
        piece, found = finder.push(character)
        shown += piece
        if found is not None:
            break
        assert not finder.held or any(string.startswith(finder.held) for string in stop)
    else:
        assert shown + finder.held == text


@pytest.mark.parametrize(
    ("stop", "text", "shown", "found"),
    [
        (("b",), "abc", "a", "b"),
        (("abcd", "bc"), "abcd", "a", "bc"),  # completed first
        (("bc", "abc"), "abcd", "", "abc"),  # completed by the same character: the longest
        (("xyz",), "abxy", "ab", None),
    ],
)
def test_first_completed_stop_string_wins(
    stop: tuple[str, ...], text: str, shown: str, found: str | None
) -> None:
    assert StopFinder(stop).push(text) == (shown, found)
    assert StopFinder(stop, keep=True).push(text) == (shown + (found or ""), found)


@pytest.mark.parametrize(
    ("exempt", "text", "shown", "found"),
    [
        ("xab", "ab", "xab", "ab"),  # the first occurrence ends in the exempt text
        ("xa", "b", "x", "ab"),  # it only begins there
        ("xcab", "d", "xcabd", None),  # `ab` is exempt even where it is held back as the beginning of `cabe`
        ("xcab", "e", "x", "cabe"),
    ],
)
def test_stop_string_must_end_beyond_the_exempt_text(
    exempt: str, text: str, shown: str, found: str | None
) -> None:
    finder = StopFinder(("ab", "cabe"))
    before = finder.skip(exempt)
    after, stop = finder.push(text)
    assert (before + after + finder.held, stop) == (shown, found)


@pytest.mark.parametrize("word", ["the", " captain", "😀", "whale-ship"])
def test_word_token_ids_are_those_inside_texts(word: str) -> None:
    tokenizer, bare = demo_tokenizer(), word.strip()
    tokenizations = tokenizer.word_token_ids(word)
    assert {tokenizer.decode(token_ids).lstrip() for token_ids in tokenizations} == {bare}
    for text in (bare, f" {bare}"):
        whole = tuple(tokenizer.encode(text))
        assert any(whole[-len(token_ids) :] == token_ids for token_ids in tokenizations)
    # None is redundant.
    assert not any(a != b and a[-len(b) :] == b for a in tokenizations for b in tokenizations)


def test_decode_inverts_encode() -> None:
    assert demo_tokenizer().decode(demo_tokenizer().encode(TEXT)) == TEXT
