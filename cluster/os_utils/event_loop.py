"""The event loop of a gateway's process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run_event_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in uvloop's event loop and return its result, as `asyncio.run` does in Python's own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
