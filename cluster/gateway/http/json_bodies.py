"""JSON bodies of requests and responses, of which large ones are read and written beside the event loop.

Reading 16 MB takes up to 240 ms, and writing 2.6 million token ids with their texts took 12 s, during which no stream
of the gateway advanced. A thread takes the interpreter for 5 ms at a time only, unless one call of C takes longer.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from json.encoder import encode_basestring_ascii
from typing import Any, TypeVar

import msgspec
import numpy as np
from fastapi import Request
from fastapi.routing import APIRoute
from msgspec import UNSET, Struct
from starlette.responses import Response

from ...text.requests.json_values import MAX_PARTS

# Parsing these takes 10 ms at most, whatever is in them. 16 MB take 100 ms if they are 524,288 long fractions, and
# 240 ms if they are 3,900 integers of 4,290 digits (AMD EPYC, one core).
MAX_BYTES_IN_LOOP = 512 << 10
# Of the header X-Request-Id.
MAX_REQUEST_ID_CHARS = 256
# Values of a response, about; making and writing these takes 1 ms.
MAX_VALUES_IN_LOOP = 2048
# Characters of a string that is taken out of a body before it is parsed: 10 us. What is left of all strings of the
# largest body is parsed in 35 ms. Quotes that are looked at: twice as many as a body's texts have.
_LONG_STRING = 256
_MAX_QUOTES = 4 * MAX_PARTS
# Values that are encoded by one call: 0.1 ms.
_SLICE = 2048

T = TypeVar("T")
Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonItems:
    """A list of one or more small items that are made as they are written: it never exists as a whole.

    Args:
        make: returns the item of one of the `sources`.
    """

    def __init__(self, make: Callable[[T], object], sources: Iterable[T]) -> None:
        self._make, self._sources = make, sources

    def __iter__(self) -> Iterator[object]:
        return map(self._make, self._sources)


def _plain(value: object) -> list[object]:
    assert isinstance(value, JsonItems), f"{type(value)} is no JSON"
    return list(value)


# One thread: several would take the interpreter from the event loop more often.
_thread = ThreadPoolExecutor(1, thread_name_prefix="large-body")
_encoder = msgspec.json.Encoder(enc_hook=_plain)


def json_bytes(value: object) -> bytes:
    """Return compact JSON in ASCII: readers of lines end one at U+2028, which JSON does not escape. NaN is null."""
    try:
        content = _encoder.encode(value)
    except (UnicodeEncodeError, OverflowError):  # a lone surrogate, or an integer of more than 64 bits
        return json.dumps(msgspec.to_builtins(value, enc_hook=_plain), separators=(",", ":")).encode()
    return content if content.isascii() else _escaped(content)


def _escaped(content: bytes) -> bytes:
    """Return the JSON with escapes for what is not ASCII.

    This writes the JSON as a string in JSON, and then takes back its escapes of quotes and backslashes. Backslashes
    come first: a run of them begins with their own escapes. Finding each run of other characters takes 1.5 to 3 times
    as long.
    """
    text = encode_basestring_ascii(content.decode())[1:-1]
    return text.replace(r"\\", "\0").replace(r"\"", '"').replace("\0", "\\").encode()


class TextTemplate:
    """JSON that is encoded once for many texts, each of which is the last string in it, or the last ones.

    Encoding a chunk of a chat with each new text took 0.55 us, and this takes 0.2 us.

    Args:
        make: returns the encoded JSON with a text in it.
        num_places: places that have the text.
    """

    def __init__(self, make: Callable[[str], bytes], num_places: int = 1) -> None:
        self._around = make("\0").decode().rsplit(r'"\u0000"', num_places)

    def with_text(self, text: str) -> bytes:
        return encode_basestring_ascii(text).join(self._around).encode()


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Id and time of a response, which each of its chunks repeats.

    Attributes:
        id: for example ``cmpl-`` and the request's id.
        created: seconds since 1970.
        request_id: value of the client's header X-Request-Id; empty if it sent none.
    """

    id: str
    created: int
    request_id: str = ""

    @staticmethod
    def new(prefix: str, request_id: str = "", sent: Mapping[str, str] | None = None) -> ResponseHead:
        """Return a head, whose id has the id that the client gave in its body, or else in the `sent` headers."""
        header = (sent or {}).get("x-request-id", "")[:MAX_REQUEST_ID_CHARS]
        named = request_id or header or uuid.uuid4().hex
        return ResponseHead(f"{prefix}{named}", int(time.time()), header)

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers by which clients name the request in their logs; without an id that no header can hold."""
        name = self.request_id or self.id
        return {"x-request-id": name} if name.isascii() and name.isprintable() else {}

    def response(self, body: object) -> Response:
        """Return a response that is complete."""
        return self._response(json_bytes(body))

    async def response_of(self, make: Callable[[], object], *, num_values: int) -> Response:
        """Return a response that is complete.

        Args:
            make: returns the body; called in a thread if the response is large.
            num_values: about the number of values in it.
        """
        if num_values <= MAX_VALUES_IN_LOOP:
            return self.response(make())
        return self._response(await in_thread(lambda: encode(make())))

    def _response(self, content: bytes) -> Response:
        return Response(content, headers=dict(self.headers), media_type="application/json")


class BodyRoute(APIRoute):
    """Route of an endpoint with a JSON body, which is parsed in a thread if it is large."""

    def get_route_handler(self) -> Endpoint:
        handle = super().get_route_handler()

        async def handle_body(request: Request) -> Response:
            return await handle(_BodyRequest(request.scope, request.receive))

        return handle_body


class _BodyRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= MAX_BYTES_IN_LOOP:
            return await super().json()
        return await in_thread(partial(parse_large, body))


def parse_large(body: bytes) -> Any:
    """Return what a body's JSON stands for; long plain strings, such as images in base64, are not scanned by json.

    The parser keeps the interpreter while it reads a string: 67 ms for 15 MB (AMD EPYC). Copying takes 1 ms.

    Raises:
        json.JSONDecodeError: it is no JSON.
    """
    pieces, strings, end = list[bytes](), dict[str, str](), 0
    mark, places = f"{uuid.uuid4().hex}:", list[tuple[int, int]]()
    for start, stop in _long_strings(body):
        key = f"{mark}{len(strings)}"
        strings[key] = str(memoryview(body)[start:stop], "ascii")
        pieces += [body[end:start], key.encode()]
        places.append((start, stop - start - len(key)))
        end = stop
    short = b"".join((*pieces, body[end:]))
    try:
        value = json.loads(short, parse_int=_integer, parse_float=_fraction)
    except json.JSONDecodeError as error:
        position = error.pos
        for start, removed in places:
            position += removed if position > start else 0
        raise json.JSONDecodeError(error.msg, body.decode(errors="replace"), position) from None
    return _with_strings(value, strings) if strings else value


def _long_strings(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield start and end of long strings in JSON that stand for themselves; gives up after many escaped quotes."""
    start = -1  # of the string that is open
    place = 0
    for _ in range(_MAX_QUOTES):
        place = body.find(b'"', place)
        if place < 0:
            return
        if start < 0:
            start = place + 1
        elif not _is_escaped(body, start, place):
            if place - start >= _LONG_STRING and _is_plain(body, start, place):
                yield start, place
            start = -1
        place += 1


def _is_escaped(body: bytes, start: int, place: int) -> bool:
    """Return whether an odd number of backslashes is before a place within a string."""
    count = 0
    while place - count > start and body[place - count - 1] == ord("\\"):
        count += 1
    return count % 2 == 1


def _is_plain(body: bytes, start: int, end: int) -> bool:
    """Return whether a string has printable ASCII without escapes."""
    if body.find(b"\\", start, end) >= 0:
        return False
    letters = np.frombuffer(body, np.uint8, end - start, start)
    return bool(letters.min() >= ord(" ") and letters.max() < 127)


def _with_strings(value: Any, strings: Mapping[str, str]) -> Any:
    """Return a value of JSON, which is changed, with strings in the places of their keys."""
    whole = [value]
    open_values: list[Any] = [whole]
    while open_values:
        parent = open_values.pop()
        if isinstance(parent, dict) and not strings.keys().isdisjoint(parent):
            members = [(strings.get(name, name), member) for name, member in parent.items()]
            parent.clear()
            parent.update(members)
        for place, member in list(parent.items() if isinstance(parent, dict) else enumerate(parent)):
            if isinstance(member, dict | list):
                open_values.append(member)
            elif isinstance(member, str) and member in strings:
                parent[place] = strings[member]
    return whole[0]


# Functions of Python, at each of which the parser's thread gives up the interpreter if the event loop wants it.
def _integer(text: str) -> int:
    return int(text)


def _fraction(text: str) -> float:
    return float(text)


async def in_thread(make: Callable[[], T]) -> T:
    """Return what `make` returns, from a thread beside the event loop."""
    return await asyncio.get_running_loop().run_in_executor(_thread, make)


def encode(value: object) -> bytes:
    """Return what `json_bytes` returns, of which no call of C writes more than a few values."""
    return b"".join(_pieces(value))


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, Struct):
        value = {name: each for name, each in msgspec.structs.asdict(value).items() if each is not UNSET}
    if isinstance(value, dict) and not _is_small(value):
        yield b"{"
        for index, (name, member) in enumerate(value.items()):
            yield b"%b%b:" % (b"," if index else b"", json_bytes(name))
            yield from _pieces(member)
        yield b"}"
    elif isinstance(value, list) and not _is_small(value):
        yield b"["
        for start in range(0, len(value), _SLICE):
            part = value[start : start + _SLICE]
            yield b"," if start else b""
            if isinstance(part[0], dict | list | Struct):
                yield from _listed(part)
            else:
                yield json_bytes(part)[1:-1]
        yield b"]"
    elif isinstance(value, JsonItems):
        for index, item in enumerate(value):
            yield (b"," if index else b"[") + json_bytes(item)
        yield b"]"
    else:
        yield json_bytes(value)


def _listed(values: list[Any]) -> Iterator[bytes]:
    for index, each in enumerate(values):
        yield b"," if index else b""
        yield from _pieces(each)


def _is_small(value: dict[str, Any] | list[Any]) -> bool:
    """Return whether a container has a few scalars only."""
    members = value.values() if isinstance(value, dict) else value
    return len(value) <= 64 and not any(
        isinstance(each, dict | list | Struct | JsonItems) for each in members
    )
