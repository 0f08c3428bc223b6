"""Signals while a server starts."""

from __future__ import annotations

import os
import signal

import pytest

from quire.cluster.host.signals import Interrupted, signals_raise


def test_signal_raises_and_the_handlers_before_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as interrupted, signals_raise():
        os.kill(os.getpid(), signal.SIGTERM)
    assert interrupted.value.signal_number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_system_error_of_a_compiled_call_that_was_interrupted_is_the_interruption() -> None:
    with pytest.raises(Interrupted) as interrupted, signals_raise():
        raise SystemError("returned a result with an exception set") from Interrupted(signal.SIGINT)
    assert interrupted.value.signal_number == signal.SIGINT


def test_other_system_errors_pass() -> None:
    with pytest.raises(SystemError, match="of another kind"), signals_raise():
        raise SystemError("of another kind")
