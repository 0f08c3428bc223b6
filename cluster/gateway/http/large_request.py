"""BodyRoute: route of an endpoint with a JSON body, which is parsed beside the event loop if it is large."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from .large_response import in_thread

# Parsing these takes 10 ms at most, whatever is in them. 16 MB take 100 ms if they are 524,288 long fractions, and
# 240 ms if they are 3,900 integers of 4,290 digits (AMD EPYC, one core).
MAX_BYTES_IN_LOOP = 512 << 10

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class BodyRoute(APIRoute):
    """Route whose request parses a large body in a thread."""

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
        return await in_thread(partial(json.loads, body, parse_int=_integer, parse_float=_fraction))


# Functions of Python, at each of which the parser's thread gives up the interpreter if the event loop wants it.
def _integer(text: str) -> int:
    return int(text)


def _fraction(text: str) -> float:
    return float(text)
