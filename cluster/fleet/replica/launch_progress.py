"""Launch stage, for code and operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class LaunchStage(Enum):
    """Stages of a launch in order; each value is the text for operators, with a place for the detail."""

    PLACING = "asks for room"
    WAITING_FOR_ROOM = "waits for room: {}"
    DOWNLOADING = "downloads {}"
    STARTING = "starts {} processes"
    LOADING = "loads {}"
    STARTED = "started: {}"
    CANARY = "waits for its first token"


@dataclass(frozen=True, slots=True)
class LaunchProgress:
    """The stage that a launch has entered, or still waits in.

    Attributes:
        detail: by stage: why there is no room, the number of processes, the model, or seconds by launch step.
    """

    stage: LaunchStage
    detail: str = ""

    def __str__(self) -> str:
        return self.stage.value.format(self.detail)


# Called in the launching thread. An exception that it raises cancels the launch, which then leaves nothing behind.
OnProgress = Callable[[LaunchProgress], None]
