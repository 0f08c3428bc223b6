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
def signals_held() -> Iterator[None]:
    """Hold back signals until the end of the block or `raise_on_signals`, also from threads that start meanwhile.

    While Ray starts, its handler in C++ would print the stack and abort the process after 3 s. Any thread can receive
    a signal, so the block begins before the imports that start some.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def signals_raise() -> Iterator[None]:
    """Hold back signals as `signals_held` does; raise Interrupted in the main thread when they are delivered.

    The previous handlers are restored at the end of the block.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        with signals_held():
            _set_handlers()
            yield
    except SystemError as error:
        # A compiled call of Ray that is interrupted returns a result as well, which Python reports by this error.
        if isinstance(error.__cause__, Interrupted):
            raise error.__cause__ from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def deliver_held_signal() -> None:
    """Deliver a signal that was held back, if there is one; go on holding back otherwise."""
    if signal.sigpending() & {*_SIGNALS}:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def raise_on_signals() -> None:
    """Raise Interrupted on signals from now on, those that were held back included; replaces Ray's handlers."""
    _set_handlers()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _set_handlers() -> None:
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
