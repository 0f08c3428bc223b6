"""Conversions of commands to an engine, for the gateway and the clients."""

from __future__ import annotations

from collections.abc import Iterable

from ....proto import admin_pb2
from ....proto.engine_command import PauseMode, SleepTag
from ....proto.errors import InvalidRequest

_MODES: dict[int, PauseMode] = {
    admin_pb2.PAUSE_MODE_UNSPECIFIED: PauseMode.KEEP,
    admin_pb2.PAUSE_MODE_KEEP: PauseMode.KEEP,
    admin_pb2.PAUSE_MODE_WAIT: PauseMode.WAIT,
    admin_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
}


def read_mode(text: str) -> PauseMode:
    """Return the treatment of running requests of a name. Raises InvalidRequest for an unknown one."""
    try:
        return PauseMode(text)
    except ValueError:
        raise InvalidRequest("mode", f"is {text!r}, must be one of {', '.join(PauseMode)}") from None


def read_tags(texts: Iterable[str]) -> tuple[SleepTag, ...]:
    """Return the parts of the memory that tags name. Raises InvalidRequest for an unknown one."""
    tags = dict[SleepTag, None]()
    for text in texts:
        try:
            tags[SleepTag(text)] = None
        except ValueError:
            raise InvalidRequest("tags", f"have {text!r}, must be of {', '.join(SleepTag)}") from None
    return tuple(tags)


def mode_from_message(number: int) -> PauseMode:
    """Raises InvalidRequest for a number of a later release."""
    if number not in _MODES:
        raise InvalidRequest("mode", f"is {number}, which this version of quire does not support")
    return _MODES[number]


def mode_to_message(text: str) -> str:
    """Return the name of an enum value. Raises InvalidRequest for an unknown mode."""
    return f"PAUSE_MODE_{read_mode(text).name}"
