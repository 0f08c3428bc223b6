"""Bodies as JSON: the same text however it is written, and an event loop that goes on turning."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loop_stall import shortest_stall

from quire.cluster.gateway.http import json_bodies
from quire.cluster.gateway.http.json_bodies import (
    JsonItems,
    ResponseHead,
    TextTemplate,
    encode,
    in_thread,
    json_bytes,
    parse_large,
)
from quire.cluster.text.media.image_source import from_base64

# In rounds of 100,000. Written in the event loop, the response takes more than 90.
MAX_STALL = 30.0

# The body and its image take more than 30 when one call reads each.
MAX_IMAGE_STALL = 16.0

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@settings(max_examples=30)
@given(JSON)
@example({"": "\x7f", "\x80": None})
def test_encoding_in_pieces_is_that_of_the_whole(value: Any) -> None:
    large = {"a list of several pieces": [value] * 2100} | {str(number): value for number in range(70)}
    assert without_escaped_delete(encode(large)) == without_escaped_delete(json_bytes(large))


def without_escaped_delete(content: bytes) -> bytes:
    """Return JSON with the one ASCII character that is escaped only beside characters that are not ASCII."""
    return content.replace(rb"\u007f", b"\x7f")


TEXTS = st.text(st.characters(codec=None) | st.sampled_from('"\\\x7f\u2028é😀\ud800'))


@given(JSON | st.dictionaries(TEXTS, TEXTS) | st.lists(TEXTS) | TEXTS)
@example({"": "\x7f", "\x80": None})
def test_json_is_compact_and_in_ascii(value: Any) -> None:
    expected = json.dumps(value, separators=(",", ":")).encode()
    assert without_escaped_delete(json_bytes(value)) == without_escaped_delete(expected)


@given(TEXTS, TEXTS)
def test_template_of_a_text_is_its_encoding(other: str, text: str) -> None:
    def make(text: str) -> bytes:
        return json_bytes({"other": other, "\0": ["\0", text, 1, None]})

    assert json.loads(TextTemplate(make).with_text(text)) == json.loads(make(text))


def test_items_that_are_made_as_they_are_written_are_a_list() -> None:
    for expected in ([None, {"1": {"rank": 2}}, [3], "4"], [5]):
        for id in "x", "\ud800":  # the latter is encoded by another encoder
            value = {"items": JsonItems(lambda item: item, expected), "id": id}
            assert json.loads(encode(value)) == {"items": expected, "id": id}
            assert json.loads(json_bytes(value)) == {"items": expected, "id": id}


def test_no_piece_has_many_values() -> None:
    value = {
        "ids": list(range(9999)),
        "top": [{str(rank): rank for rank in range(9)}] * 999,
        "text": "x" * 99,
    }
    pieces = list(json_bodies._pieces(value))
    assert max(piece.count(b",") for piece in pieces) < json_bodies._SLICE
    assert json.loads(b"".join(pieces)) == value


@pytest.mark.parametrize("num_values", [1, 400_000])
def test_large_response_does_not_stall_the_event_loop(num_values: int) -> None:
    def body() -> dict[str, Any]:
        return {"ids": list(range(num_values)), "texts": [str(number) for number in range(num_values)]}

    async def respond() -> None:
        response = await ResponseHead("x", 0).response_of(body, num_values=2 * num_values)
        responses.append(response.body)
        await asyncio.sleep(0)  # a turn that ends the last stall

    responses: list[bytes | memoryview] = []
    assert asyncio.run(shortest_stall(respond, MAX_STALL)) <= MAX_STALL
    assert json.loads(bytes(responses[0])) == body()


def outcome(parse: Callable[[bytes], Any], body: bytes) -> Any:
    """Return what a parser returns, or the text of its error."""
    try:
        return parse(body)
    except UnicodeDecodeError:
        return "no text"
    except json.JSONDecodeError as error:
        return str(error)


@settings(max_examples=100)
@given(JSON, st.booleans(), st.integers(0, 60))
@example({'a quote \\" and': ["abc", {"abcd": "e\n"}]}, True, 0)
def test_large_bodies_are_parsed_as_json_does(value: Any, is_ascii: bool, cut: int) -> None:
    body = json.dumps(lengthened(value), ensure_ascii=is_ascii).encode()
    body = body[:-cut] if cut and cut % 3 == 0 else body
    assert outcome(parse_large, body) == outcome(json.loads, body)


def lengthened(value: Any) -> Any:
    """Return a value whose texts of three or more characters are so long that they are parsed apart."""
    if isinstance(value, dict):
        return {lengthened(name): lengthened(member) for name, member in value.items()}
    if isinstance(value, list):
        return [lengthened(member) for member in value]
    return value * (70_000 // len(value)) if isinstance(value, str) and len(value) > 2 else value


@pytest.mark.parametrize("text", ["a" * 70000 + "\t", "a" * 70000 + "\u00e9", "\\" + "a" * 70000])
def test_long_strings_that_json_changes_or_refuses_are_left_to_it(text: str) -> None:
    body = f'["{text}"]'.encode()
    assert outcome(parse_large, body) == outcome(json.loads, body)


def test_images_in_bodies_do_not_stall_the_loop() -> None:
    text = base64.b64encode(os.urandom(12_000_000)).decode()
    body = json.dumps({"messages": [{"content": [{"type": "image_url", "url": text}]}]}).encode()

    def read() -> None:
        (message,) = parse_large(body)["messages"]
        assert from_base64(message["content"][0]["url"])[:3] == base64.b64decode(text[:4])

    stall = asyncio.run(shortest_stall(lambda: in_thread(read), MAX_IMAGE_STALL))
    assert stall <= MAX_IMAGE_STALL
