"""`quire chaos`: failures on purpose, to see how a server recovers."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from .connection import DEFAULT_TARGET, Target, TlsCa, TokenFile, connect


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
