"""`make demo`: two tensor-parallel workers serve concurrent gRPC requests, then the server shuts down.

DEMO_JSON=FILE also writes the figures to FILE. The exit status is 0 if every request finished and the server left
nothing behind, 130 after Ctrl-C with nothing left behind, and 1 otherwise.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from ....proto.errors import QuireError
from ...client.client import Client
from .prompts import REQUESTS
from .screen import follow, measure, table, write
from .server import ServerProcess
from .streams import Streams

TENSOR_PARALLEL_SIZE = 2
READY_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 120.0
_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
_ARGUMENTS = "demo", "--device", "cpu", "--tensor-parallel-size", str(TENSOR_PARALLEL_SIZE)


def main() -> int:
    console = Console()
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    server = ServerProcess(*_ARGUMENTS)
    status = 1
    try:
        status = _run(console, server)
    except QuireError as error:
        console.print(f"demo: {error}", style="red", highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print("interrupted: shutting down")
        status = 130
    finally:
        is_clean = _shut_down(console, server)
    return status if is_clean else 1


def _run(console: Console, server: ServerProcess) -> int:
    started = time.monotonic()
    console.print(f"starting `quire serve {' '.join(_ARGUMENTS)}`", highlight=False)
    address = server.wait_ready(READY_TIMEOUT_S)
    ready_s = time.monotonic() - started
    console.print(
        f"ready on {address} after {ready_s:.1f} s: {len(REQUESTS)} requests at once\n", highlight=False
    )
    with Client(address) as client:
        streams = Streams(client, REQUESTS)
        streams.start()
        in_time = follow(console, streams, ANSWER_TIMEOUT_S)
        (replica,) = client.status()
        figures = measure(streams, replica, ready_s)
    console.print(table(figures))
    if path := os.environ.get("DEMO_JSON"):
        write(Path(path), "python -m quire.cluster.cli.demo", figures)
    failed = [stream for stream in streams.streams if stream.finished is None]
    for stream in failed:
        console.print(
            f"not answered: {stream.request.title}: {stream.error or 'no end in time'}", style="red"
        )
    return 0 if in_time and not failed else 1


def _shut_down(console: Console, server: ServerProcess) -> bool:
    """Stop the server; return True if it shut down cleanly and left nothing behind."""
    with server:
        status = server.stop()
        left = server.leftovers()
        log = server.log.strip()
    for thing in left:
        console.print(f"left behind: {thing}", style="red", highlight=False)
    if not left:
        console.print("shut down: no process, no shared memory, no socket, no file left")
    # SIGTERM ends a server that was still importing its modules, and has started nothing.
    is_orderly = status >= 0 or status == -signal.SIGTERM
    if not is_orderly:
        console.print(
            f"the server was ended by {signal.Signals(-status).name}: {log}", style="red", highlight=False
        )
    return not left and is_orderly


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    # A second signal must not interrupt the shutdown that the first one starts.
    for other in _SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main())
