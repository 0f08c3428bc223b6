"""Commands to an engine as a whole: pause, sleep, and other weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .later_fields import sent_if_set

# Loading the weights of a large model from a slow disk.
COMMAND_TIMEOUT_S = 1800.0


class Action(StrEnum):
    """PAUSE and RESUME concern the scheduler; the ranks carry out the others."""

    PAUSE = "pause"
    RESUME = "resume"
    SLEEP = "sleep"
    WAKE_UP = "wake_up"
    UPDATE_WEIGHTS = "update_weights"


class PauseMode(StrEnum):
    """Treatment of running requests before a command; the names are vLLM's.

    KEEP: they wait, and continue afterwards. If their KV is dropped, it is computed again, by the weights of then.
    WAIT: they finish first; waiting requests wait.
    ABORT: they end with RequestAborted, waiting ones as well.
    """

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class SleepTag(StrEnum):
    """Memory that a sleep frees, and that can be taken again one part after the other; the names are vLLM's.

    WEIGHTS: those of the model, its adapters and its drafts.
    KV_CACHE: the KV blocks.
    """

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


ALL_TAGS = frozenset(SleepTag)


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """A command.

    Attributes:
        mode: see PauseMode; without effect on RESUME and WAKE_UP.
        level: level of a SLEEP. 1: WAKE_UP reads the same weights again. 2: the weights are discarded, and other
            ones must be named by UPDATE_WEIGHTS before all is awake.
        path: new weights of an UPDATE_WEIGHTS: a model directory with the same tensors, on every node.
        version: name of the weights of an UPDATE_WEIGHTS, which outputs report.
        timestamp: time of an UPDATE_WEIGHTS: updates sort by it, and a replica carries out the latest one once.
        tags: parts that a WAKE_UP wakes; all if empty. Requests are refused until all is awake.
    """

    action: Action
    mode: PauseMode = PauseMode.KEEP
    level: int = 1
    path: str = ""
    version: str = ""
    timestamp: str = ""
    tags: tuple[SleepTag, ...] = sent_if_set(())
