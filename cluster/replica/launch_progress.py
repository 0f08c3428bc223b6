"""What the launch of a replica is at: a stage for programs, a line for operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class LaunchStage(Enum):
    """The stages of a launch in their order; the values are the words for operators, with room for the detail."""

    PLACING = "asks for room"
    WAITING_FOR_ROOM = "waits for room: {}"
    STARTING = "starts {} processes"
    LOADING = "loads {}"
    STARTED = "started: {}"
    PROVING = "waits for its first token"


@dataclass(frozen=True, slots=True)
class LaunchProgress:
    """A launch has come to a stage, or goes on waiting in it.

    Attributes:
        detail: of that stage: why there is no room, how many processes, which model, or where the time went.
    """

    stage: LaunchStage
    detail: str = ""

    def __str__(self) -> str:
        return self.stage.value.format(self.detail)


# Called in the launching thread. It may raise: then the launch ends with that, and leaves nothing.
Tell = Callable[[LaunchProgress], None]
