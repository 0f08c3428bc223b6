"""Commands for a running server: `quire scale`, `undrain`, `flush-cache`, `events` and `chaos`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from .connection import DEFAULT_TARGET, Target, TlsCa, TokenFile, connect

if TYPE_CHECKING:
    from ..client.wire.status import FleetEvent


def scale(
    model: Annotated[str, typer.Argument(help="Name that the model is served under.")],
    replicas: Annotated[
        int | None, typer.Argument(help="Number of replicas, with which the autoscaler is off.", min=0)
    ] = None,
    min_replicas: Annotated[
        int | None, typer.Option("--min", help="Lower bound of the autoscaler.", min=0)
    ] = None,
    max_replicas: Annotated[
        int | None, typer.Option("--max", help="Upper bound of the autoscaler.", min=0)
    ] = None,
    target: Target = DEFAULT_TARGET,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Set how many replicas a model of a running fleet has, or the bounds of its autoscaler.

    Example: `quire scale demo 3 --target 127.0.0.1:50051`
    """
    if (replicas is None) == (min_replicas is None and max_replicas is None):
        raise typer.BadParameter("give either the number of replicas, or --min, --max or both")
    with connect(target, token_file, tls_ca) as client:
        least, most = client.set_scale(
            model,
            min_replicas if replicas is None else replicas,
            max_replicas if replicas is None else replicas,
        )
    print(f"{model}: {least} to {most} replicas")


def undrain(
    replica: Annotated[
        str, typer.Argument(help="Id of a replica, or its first characters; `quire status` shows ids.")
    ],
    target: Target = DEFAULT_TARGET,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Take back the drain of a replica that still waits for another one to take over.

    Example: `quire undrain replica-4f2a --target 127.0.0.1:50051`
    """
    with connect(target, token_file, tls_ca) as client:
        for replica_id in client.undrain(replica):
            print(f"{replica_id} stays")


def flush_cache(
    model: Annotated[
        str, typer.Argument(help="Name that the model is served under; not needed for a single model.")
    ] = "",
    target: Target = DEFAULT_TARGET,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Empty the prefix caches of a model's replicas.

    Example: `quire flush-cache demo --target 127.0.0.1:50051`
    """
    with connect(target, token_file, tls_ca) as client:
        for replica_id in client.flush_cache(model):
            print(f"{replica_id} empties its cache")


def events(target: Target = DEFAULT_TARGET, token_file: TokenFile = None, tls_ca: TlsCa = None) -> None:
    """Print the changes of deployments, replicas and nodes as they happen, until Ctrl-C.

    Example: `quire events --target 127.0.0.1:50051`
    """
    with connect(target, token_file, tls_ca) as client:
        for event in client.watch_events():
            print(_line(event), flush=True)


def _line(event: FleetEvent) -> str:
    """Return an event as one line: the time, the object and its state."""
    from datetime import datetime

    from ..client.wire.status import DeploymentInfo, NodeInfo

    time, changed = datetime.fromtimestamp(event.time).strftime("%H:%M:%S"), event.object
    if isinstance(changed, DeploymentInfo):
        what, state = f"model {changed.model}", f"{changed.target_replicas} replicas: {changed.reason}"
    elif isinstance(changed, NodeInfo):
        what, state = f"node {changed.node_id[:12]}", "draining" if changed.draining else "up"
    else:
        what = changed.replica_id
        is_ready = changed.ready and changed.state != "draining"
        state = "ready" if is_ready else (changed.state or "not ready")
        state += f": {changed.problem}" if changed.problem else ""
    return f"{time}  {what}  {'removed' if event.is_removed else state}"


class Action(StrEnum):
    """Actions of `quire chaos`; the part before the dash is a FaultKind, the other one the process."""

    KILL_RANK = "kill-rank"
    STOP_RANK = "stop-rank"
    EXCEPTION_RANK = "exception-rank"
    SLOW_RANK = "slow-rank"
    POISON_RANK = "poison-rank"
    KILL_SCHEDULER = "kill-scheduler"
    STOP_SCHEDULER = "stop-scheduler"


def chaos(
    action: Annotated[Action, typer.Argument(help="Kind of failure, and the process that fails.")],
    rank: Annotated[int, typer.Argument(help="The rank that fails.", min=0)] = 0,
    replica: Annotated[
        str,
        typer.Option(help="Id of the replica, or its first characters; not needed if there is one."),
    ] = "",
    delay: Annotated[float, typer.Option(help="With slow-rank, the delay of each step in seconds.")] = 0.2,
    duration: Annotated[
        float, typer.Option(help="With slow-rank and poison-rank, how long they last, in seconds.")
    ] = 30.0,
    token_id: Annotated[
        int, typer.Option(help="With poison-rank, the token whose sequences fail when they begin.", min=0)
    ] = 0,
    target: Target = DEFAULT_TARGET,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Cause a failure in a running replica, for a game day. The server must run with --enable-chaos.

    Example: `quire chaos kill-rank 1 --target 127.0.0.1:50051`
    """
    from ...proto.faults import Fault, FaultKind

    kind, _, process = action.partition("-")
    fault = Fault(FaultKind(kind), delay, duration, token_id)
    with connect(target, token_file, tls_ca) as client:
        replica_id, pid = client.inject_fault(
            fault, rank=None if process == "scheduler" else rank, replica_id=replica
        )
    who = process if process == "scheduler" else f"rank {rank}"
    print(f"{replica_id}: {kind} of {who}, process {pid}")
