"""Commands to an engine, made of the arguments of their calls; and the methods of `collective_rpc`.

vLLM's collective_rpc runs any method, or a pickled function, on the workers. Here a name chooses from METHODS, so
that no caller runs code of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ....proto.engine_command import Action, EngineCommand, PauseMode, SleepTag
from ....proto.errors import InvalidRequest, InvalidType
from ....proto.replica_status import RankStatus
from .json_values import check_text

MAX_VERSION_CHARS = 256
MAX_PATH_CHARS = 4096


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


def sleep_command(level: int = 1, mode: PauseMode = PauseMode.KEEP) -> EngineCommand:
    """Raises InvalidRequest if a value is not allowed."""
    if level not in (1, 2):
        raise InvalidRequest("level", f"is {level}, must be 1 or 2")
    return EngineCommand(Action.SLEEP, mode, level=level)


def wake_up_command(tags: Iterable[str] | None = None) -> EngineCommand:
    """Raises InvalidRequest for an unknown tag."""
    if not isinstance(tags, Iterable | None):
        raise InvalidType("tags", f"are of type {type(tags).__name__}, must be a list")
    return EngineCommand(Action.WAKE_UP, tags=read_tags(tags or ()))


def update_command(path: str, version: str, mode: PauseMode = PauseMode.KEEP) -> EngineCommand:
    """Raises InvalidRequest if a value is not allowed."""
    for field, text, most in (("path", path, MAX_PATH_CHARS), ("version", version, MAX_VERSION_CHARS)):
        if not isinstance(text, str):
            raise InvalidType(field, f"is of type {type(text).__name__}, must be text")
        if not 1 <= len(text) <= most:
            raise InvalidRequest(field, f"has {len(text)} characters, must have 1 to {most}")
        check_text(field, text)
    if not Path(path).is_absolute():
        raise InvalidRequest(
            "path", f"is {path!r}, must be absolute: the ranks have working directories of their own"
        )
    return EngineCommand(Action.UPDATE_WEIGHTS, mode, path=path, version=version)


def _reset_prefix_cache() -> None:
    """Forget the cached prefixes."""


def _rank_status() -> None:
    """Return the process of each rank and the stage it is in."""


RESET_PREFIX_CACHE, RANK_STATUS = "reset_prefix_cache", "rank_status"
# Method of `collective_rpc` |-> function of its arguments, which returns the command if the method is one.
METHODS: Mapping[str, Callable[..., EngineCommand | None]] = {
    "sleep": lambda level=1: sleep_command(level),
    "wake_up": lambda tags=None: wake_up_command(tags),
    "update_weights": lambda path, version: update_command(path, version),
    RESET_PREFIX_CACHE: _reset_prefix_cache,
    RANK_STATUS: _rank_status,
}


def read_collective_call(method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> EngineCommand | None:
    """Return the command of a call of `collective_rpc`; None for a method that is none.

    Raises:
        InvalidRequest: there is no such method, or it has other arguments.
    """
    allowed = f"must be one of {', '.join(METHODS)}"
    if not isinstance(method, str):
        raise InvalidType("method", f"is of type {type(method).__name__}, {allowed}: functions are not sent")
    if method not in METHODS:
        raise InvalidRequest("method", f"is {method[:64]!r}, {allowed}")
    make = METHODS[method]
    try:
        bound = inspect.signature(make).bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidRequest("args", f"are not those of {method}: {error}") from None
    return make(*bound.args, **bound.kwargs)


def collective_results(method: str, ranks: Sequence[RankStatus]) -> list[dict[str, Any] | None]:
    """Return the result of a call on each rank."""
    return [asdict(rank) if method == RANK_STATUS else None for rank in ranks]
