"""The control plane of a replica.

`core`, `kv` and `sequences` are the scheduler proper: pure Python and numpy, without Ray, ZeroMQ, threads or a clock
(time is passed in), as an import contract in pyproject.toml checks. `service` runs it: the step loop, its mailboxes
and the Ray actor.

The names below are what the rest of quire may import. They are imported at their first use, since some load Ray.
"""

# ruff: noqa: I001  (isort gives each "X as X" a line of its own)
from __future__ import annotations

from typing import TYPE_CHECKING

from ..proto.lazy_names import lazy_names

if TYPE_CHECKING:  # the table below, for type checkers: X as X exports a name
    from .core.results.equal_steps import DecodedSteps as DecodedSteps
    from .core.scheduler import Scheduler as Scheduler
    from .kv.kv_tiers import KvTiers as KvTiers
    from .service.actor import WATCH_GROUP as WATCH_GROUP, SchedulerActor as SchedulerActor
    from .service.event_sink import EventSink as EventSink
    from .service.kv_events import open_sink as open_sink
    from .service.loop import StepLoop as StepLoop
    from .service.mailbox import InMemoryMailbox as InMemoryMailbox
    from .service.step_meter import (
        MeasuredStep as MeasuredStep,
        MeteredRanks as MeteredRanks,
        PlanMeter as PlanMeter,
        StepWork as StepWork,
    )
    from .service.step_record import read_steps as read_steps, recorded_ranks as recorded_ranks
    from .service.worker_group import Rebuilt as Rebuilt, WorkerGroup as WorkerGroup
else:
    __all__, __getattr__ = lazy_names(
        __name__,
        {
            ".core.results.equal_steps": "DecodedSteps",
            ".core.scheduler": "Scheduler",
            ".kv.kv_tiers": "KvTiers",
            ".service.actor": "WATCH_GROUP SchedulerActor",
            ".service.event_sink": "EventSink",
            ".service.kv_events": "open_sink",
            ".service.loop": "StepLoop",
            ".service.mailbox": "InMemoryMailbox",
            ".service.step_meter": "MeasuredStep MeteredRanks PlanMeter StepWork",
            ".service.step_record": "read_steps recorded_ranks",
            ".service.worker_group": "Rebuilt WorkerGroup",
        },
    )
