"""The size of a JSON body, counted before it is parsed, and the event loop that goes on turning meanwhile."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_stall import shortest_stall
from serving import ServerFactory

from quire.cluster.text.requests.json_values import MAX_ITEMS, MAX_PARTS, JsonSize

# In rounds of 100,000, of about 2 ms. Without the count, 1.3 million empty lists took 3,000, 400,000 biases 600, two
# million token ids 170. With an error per item, 524,288 fractions took 5,000. The longest takes 12 to 47 now: a text
# of 16 MB is decoded by one call.
MAX_STALL = 120.0

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a"\\,[]{}é\n')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('k"\\,')), inner),
    max_leaves=30,
)


def count(chunks: Sequence[bytes]) -> tuple[int, int]:
    size = JsonSize()
    for chunk in chunks:
        size.add(chunk)
    return size.num_parts, size.num_items


def expected(value: Any) -> tuple[int, int]:
    """Parts and commas of a value."""
    if isinstance(value, str):
        return 1, 0
    if not isinstance(value, list | dict):
        return 0, 0
    children = value if isinstance(value, list) else [*value, *value.values()]
    inner = [expected(child) for child in children]
    return 1 + sum(parts for parts, _ in inner), max(0, len(value) - 1) + sum(items for _, items in inner)


@given(JSON, st.booleans(), st.lists(st.integers(0, 200)))
def test_count_is_that_of_the_document_however_it_is_split(
    value: Any, is_ascii: bool, cuts: list[int]
) -> None:
    raw = json.dumps(value, ensure_ascii=is_ascii).encode()
    bounds = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    chunks = [raw[start:end] for start, end in itertools.pairwise(bounds)]
    assert count(chunks) == count([raw]) == expected(value)


@given(st.lists(st.binary(max_size=50)))
def test_what_is_no_json_is_counted_somehow(chunks: list[bytes]) -> None:
    num_parts, num_items = count(chunks)
    assert num_parts + num_items <= sum(map(len, chunks))


def test_texts_that_do_not_end_are_scanned_once() -> None:
    """A second look at each escaped quote would take hours."""
    assert count([b'"' + b'\\"' * 2_000_000]) == (1, 0)
    assert count([b'"', *[b'\\"' * 1000] * 1000, b'"']) == (1, 0)


def listed(item: str, number: int) -> str:
    return "[" + ",".join([item] * number) + "]"


def completion(field: str, value: str) -> tuple[str, str]:
    return "/v1/completions", f'{{"model":"tiny","max_tokens":1,"prompt":"x","{field}":{value}}}'


def members(number: int, value: str = "1") -> str:
    return "{" + ",".join(f'"{n}":{value}' for n in range(number)) + "}"


MANY = MAX_ITEMS - 8
SCHEMA = '{"json":"{\\"enum\\":' + listed("[]", 170_000) + '}"}'

# path and body
HOSTILE = {
    "lists": completion("prompt", listed("[]", 1_300_000)),
    "texts": completion("prompt", listed('""', 1_300_000)),
    "biases": completion("logit_bias", members(400_000)),
    "unknown": completion("other", members(400_000)),
    "numbers": completion("prompt", listed("1", 2_000_000)),
    "depth": completion("prompt", "[" * 1_000_000 + "]" * 1_000_000),
    "fractions": completion("prompt", listed("1.5", MANY)),
    "fractions to embed": ("/v1/embeddings", '{"input":' + listed("1.5", MANY) + "}"),
    "fractions to rank": ("/rerank", '{"query":"x","documents":' + listed("1.5", MANY) + "}"),
    "long fractions": completion("prompt", listed("1.123456789012345678901234567", MANY)),
    "long integers": completion("prompt", listed("9" * 4290, 3900)),
    "escapes": completion("prompt", '"' + "\\n" * (8_000_000) + '"'),
    "bad words": completion("bad_words", listed("1", MANY)),
    "long bad words": completion("bad_words", listed(listed("999", 1024), 256)),
    "long name": completion("y" * (15 << 20), "1"),
    "long key": completion("logit_bias", '{"' + "y" * (15 << 20) + '":1}'),
    "names": completion("x", "1," + ",".join(f'"max_taken{n}":1' for n in range(32_000))),
    "choices of a schema": completion("structured_outputs", '{"json":{"enum":' + listed("1", MANY) + "}}"),
    "text of a schema": completion("structured_outputs", SCHEMA),
    "arguments": completion("vllm_xargs", '{"x":' + listed("1.5", MANY) + "}"),
}


async def test_no_body_of_16_mb_stalls_the_event_loop(serve: ServerFactory) -> None:
    stalled: dict[str, float] = {}
    async with serve(http=True) as server, httpx.AsyncClient(base_url=server.url, timeout=60.0) as client:
        client.headers["content-type"] = "application/json"
        for name, (path, body) in HOSTILE.items():

            async def answered(name: str = name, path: str = path, body: bytes = body.encode()) -> None:
                response = await client.post(path, content=body)
                assert response.status_code == (200 if "name" in name else 400), (name, response.text)

            stalled[name] = await shortest_stall(answered, MAX_STALL)
    assert max(stalled.values()) <= MAX_STALL, stalled


@pytest.mark.parametrize("value", [[[1]] * (MAX_PARTS // 2), [1] * MAX_ITEMS, {"text": "a,[" * 1_000_000}])
def test_large_values_of_valid_requests_pass(value: Any) -> None:
    size = JsonSize()
    size.add(json.dumps(value).encode())
    assert not size.is_too_large
