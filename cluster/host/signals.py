"""SIGINT and SIGTERM: an exception while a server starts, a future while its event loop runs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_SIGNALS = signal.SIGINT, signal.SIGTERM


class Interrupted(BaseException):
    """A signal arrived during start-up."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


@contextmanager
def signals_raise() -> Iterator[None]:
    """Raise Interrupted in the main thread on a signal; restore the previous handlers at the end of the block."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    raise_on_signals()
    try:
        yield
    except SystemError as error:
        if isinstance(
            error.__cause__, Interrupted
        ):  # raised in a compiled call of Ray, which returned a result
            raise error.__cause__ from None
        raise
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
    # A second signal must not interrupt the shutdown after the first.
    ignore_signals()
    raise Interrupted(number)


def next_signal() -> asyncio.Future[int]:
    """Return a future of the next signal's number. For the event loop of the main thread."""
    loop = asyncio.get_running_loop()
    arrival: asyncio.Future[int] = loop.create_future()

    def on_signal(number: int) -> None:
        if not arrival.done():
            arrival.set_result(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    return arrival
