"""Large responses: the same JSON, and an event loop that goes on turning."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_stall import watch_stalls

from quire.cluster.gateway.http import large_response
from quire.cluster.gateway.http.json_text import JsonItems, json_text
from quire.cluster.gateway.http.large_response import encode, response_of
from quire.cluster.gateway.http.response_head import ResponseHead

# In rounds of 100,000. Written in the event loop, the response takes more than 90.
MAX_STALL = 30.0

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@settings(max_examples=30)
@given(JSON, st.integers(1, 3))
def test_encoding_in_pieces_is_that_of_the_whole(value: Any, num_values: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_response, "_SLICE", num_values)
        patch.setattr(large_response, "_is_small", lambda value: not value)
        assert encode(value).decode() == json_text(value)
    assert encode(value).decode() == json_text(value)


def test_items_that_are_made_as_they_are_written_are_a_list() -> None:
    expected: dict[str, list[Any]] = {"items": [None, {"1": {"rank": 2}}, [3], "4"], "single": [5]}

    def value() -> dict[str, JsonItems]:
        return {name: JsonItems(iter(items)) for name, items in expected.items()}

    assert json.loads(encode(value())) == expected
    assert json.loads(json_text(value())) == expected


def test_no_piece_has_many_values() -> None:
    value = {
        "ids": list(range(9999)),
        "top": [{str(rank): rank for rank in range(9)}] * 999,
        "text": "x" * 99,
    }
    pieces = list(large_response._pieces(value))
    assert max(piece.count(",") for piece in pieces) < large_response._SLICE
    assert json.loads("".join(pieces)) == value


@pytest.mark.parametrize("num_values", [1, 400_000])
def test_large_response_does_not_stall_the_event_loop(num_values: int) -> None:
    def body() -> dict[str, Any]:
        return {"ids": list(range(num_values)), "texts": [str(number) for number in range(num_values)]}

    async def scenario() -> None:
        async with watch_stalls() as stalls:
            response = await response_of(ResponseHead("x", 0), body, num_values=2 * num_values)
            await asyncio.sleep(0)  # a turn that ends the last stall
        assert json.loads(bytes(response.body)) == body()
        assert stalls.longest <= MAX_STALL

    asyncio.run(scenario())
