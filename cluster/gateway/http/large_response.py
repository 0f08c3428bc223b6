"""Responses that are too large to be written in the event loop.

Writing 2.6 million token ids with their texts took 12 s, during which no stream of the gateway advanced. A thread
takes the interpreter for 5 ms at a time only, unless one call of C takes longer, as that of the JSON encoder does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.responses import Response

from .json_text import JsonItems, json_text
from .response_head import ResponseHead

# Values of a response, about; writing these takes 1 ms.
MAX_VALUES_IN_LOOP = 2048
# Values that are encoded by one call: 1 ms.
_SLICE = 2048

T = TypeVar("T")

# One thread: several would take the interpreter from the event loop more often.
_writer = ThreadPoolExecutor(1, thread_name_prefix="large-response")


async def in_thread(make: Callable[[], T]) -> T:
    """Return what `make` returns, from a thread beside the event loop."""
    return await asyncio.get_running_loop().run_in_executor(_writer, make)


async def response_of(
    head: ResponseHead, make: Callable[[], Mapping[str, object]], *, num_values: int
) -> Response:
    """Return a whole response.

    Args:
        make: returns the body; called in a thread if the response is large.
        num_values: about the number of values in it.
    """
    if num_values <= MAX_VALUES_IN_LOOP:
        return head.response(make())
    content = await in_thread(lambda: encode(make()))
    return Response(content, headers=dict(head.headers), media_type="application/json")


def encode(value: object) -> bytes:
    """Return compact JSON, of which no call of C writes more than a few values."""
    return "".join(_pieces(value)).encode()


def _pieces(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and not _is_small(value):
        yield "{"
        for index, (name, member) in enumerate(value.items()):
            yield f"{',' if index else ''}{json_text(name)}:"
            yield from _pieces(member)
        yield "}"
    elif isinstance(value, list) and not _is_small(value):
        yield "["
        for start in range(0, len(value), _SLICE):
            part = value[start : start + _SLICE]
            yield "," if start else ""
            if isinstance(part[0], dict | list):
                yield from _listed(part)
            else:
                yield json_text(part)[1:-1]
        yield "]"
    elif isinstance(value, JsonItems):
        for index, item in enumerate(value.items):
            yield f"{',' if index else '['}{json_text(item)}"
        yield "]"
    else:
        yield json_text(value)


def _listed(values: list[Any]) -> Iterator[str]:
    for index, each in enumerate(values):
        yield "," if index else ""
        yield from _pieces(each)


def _is_small(value: dict[str, Any] | list[Any]) -> bool:
    """Return whether a container has a few scalars only."""
    members = value.values() if isinstance(value, dict) else value
    return len(value) <= 64 and not any(isinstance(each, dict | list | JsonItems) for each in members)
