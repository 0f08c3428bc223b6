"""`quire top`."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ...proto.errors import QuireError, in_one_line
from .connection import DEFAULT_TARGET, Target, TlsCa, TokenFile, connect

if TYPE_CHECKING:
    from ..client.client import Client
    from .top_view import Look

# A server that does not answer in this time is shown as silent.
ANSWER_TIMEOUT_S = 2.0
MAX_MAPS = 4

Interval = Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Time between two looks.")]
Once = Annotated[
    bool,
    typer.Option(
        "--once", help="Print one look and exit, as without a terminal; status 1 without an answer."
    ),
]


def top(
    target: Target = DEFAULT_TARGET,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    interval: Interval = 1.0,
    once: Once = False,
) -> None:
    """Watch a server: throughput, latencies, replicas, ranks, queues and KV blocks, until Ctrl-C.

    If the server hangs or is gone, the last look stays with the time since which there is no answer.

    Example: `quire top --target 127.0.0.1:50051`
    """
    from rich.console import Console
    from rich.live import Live

    from .top_view import Look, render

    console = Console()
    with connect(target, token_file, tls_ca) as client:
        look = look_at(client, Look())
        if once or not console.is_terminal:
            console.print(render(look, target, time.time(), console.width))
            raise typer.Exit(bool(look.problem))
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(render(look, target, time.time(), console.width), refresh=True)
                time.sleep(interval)
                look = look_at(client, look)


def look_at(client: Client, last: Look) -> Look:
    """Return what the server shows now; if it does not answer, the last look with the problem."""
    from .top_view import Look

    try:
        fleet = client.fleet(cached=True, timeout_s=ANSWER_TIMEOUT_S)
    except QuireError as error:
        return replace(last, problem=in_one_line(error))
    maps = {}
    for replica in fleet.replicas[:MAX_MAPS]:
        with suppress(QuireError):  # a replica that hangs is shown as silent, without its blocks
            maps[replica.replica_id] = client.block_map(replica.replica_id, timeout_s=ANSWER_TIMEOUT_S / 2)
    return Look(time.time(), fleet, maps)
