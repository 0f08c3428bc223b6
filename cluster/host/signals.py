"""SIGINT and SIGTERM: an exception while a server starts, a future once its event loop runs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_SIGNALS = signal.SIGINT, signal.SIGTERM


class Interrupted(BaseException):
    """A signal came during start-up."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


@contextmanager
def signals_raise() -> Iterator[None]:
    """A signal raises Interrupted in the main thread; the handlers from before are put back at the end."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    raise_on_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def raise_on_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, _interrupt)


def ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    # A second one must not interrupt the shutdown that the first one begins.
    ignore_signals()
    raise Interrupted(number)


def next_signal() -> asyncio.Future[int]:
    """The number of the next signal, once it has come. For the main thread's running event loop."""
    loop = asyncio.get_running_loop()
    arrival: asyncio.Future[int] = loop.create_future()

    def note(number: int) -> None:
        if not arrival.done():
            arrival.set_result(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, note, number)
    return arrival
