"""Signals while a server starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from deadlines import PROGRAM_TIMEOUT_S

from quire.cluster.os_utils.signals import (
    Interrupted,
    deliver_held_signal,
    raise_on_signals,
    signals_raise,
)


def terminate_self() -> None:
    with signals_raise():
        raise_on_signals()
        os.kill(os.getpid(), signal.SIGTERM)


def test_signal_raises_and_the_handlers_before_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as interrupted:
        terminate_self()
    assert interrupted.value.signal_number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_system_error_of_a_compiled_call_that_was_interrupted_is_the_interruption() -> None:
    with pytest.raises(Interrupted) as interrupted, signals_raise():
        raise SystemError("returned a result with an exception set") from Interrupted(signal.SIGINT)
    assert interrupted.value.signal_number == signal.SIGINT


def test_other_system_errors_pass() -> None:
    with pytest.raises(SystemError, match="of another kind"), signals_raise():
        raise SystemError("of another kind")


# In a process of its own: a thread of another test would receive the signal.
HELD = """
import os, signal, sys
from quire.cluster.os_utils import signals
try:
    with signals.signals_raise():
        os.kill(os.getpid(), signal.SIGTERM)
        print("held")
        getattr(signals, sys.argv[1])()
        print("not delivered")
except signals.Interrupted as interrupted:
    print(interrupted.signal_number, signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


@pytest.mark.parametrize("deliver", ["deliver_held_signal", "raise_on_signals"])
def test_held_signal_raises_when_it_is_delivered(deliver: str) -> None:
    command = [sys.executable, "-c", HELD, deliver]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=True)
    assert done.stdout.splitlines() == ["held", f"{int(signal.SIGTERM)} False"]


def test_nothing_is_delivered_without_a_signal() -> None:
    with signals_raise():
        deliver_held_signal()
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
