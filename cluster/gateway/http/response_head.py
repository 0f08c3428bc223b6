"""ResponseHead: the identity of one response, which each of its chunks repeats."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.responses import Response

from .json_text import json_text


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Id and time of a response.

    Attributes:
        id: for example ``cmpl-`` and the request's id.
        created: seconds since 1970.
    """

    id: str
    created: int

    @staticmethod
    def new(prefix: str, request_id: str = "") -> ResponseHead:
        return ResponseHead(f"{prefix}{request_id or uuid.uuid4().hex}", int(time.time()))

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers by which clients name the request in their logs; without an id that no header can hold."""
        is_plain = self.id.isascii() and self.id.isprintable()
        return {"x-request-id": self.id} if is_plain else {}

    def response(self, body: Mapping[str, object]) -> Response:
        """Return a response that is complete."""
        return Response(json_text(body), headers=dict(self.headers), media_type="application/json")
