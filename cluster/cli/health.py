"""`quire health`."""

from __future__ import annotations

import typer

from .connection import Target, TlsCa, connect
from .exit_status import FAILED


def health(target: Target = "127.0.0.1:50051", tls_ca: TlsCa = None) -> None:
    """Say whether the server takes requests; exit status 1 when it does not. For probes: it needs no token.

    Example: `quire health --target 127.0.0.1:50051`
    """
    with connect(target, None, tls_ca) as client:
        is_ready = client.is_ready()
    print("ready" if is_ready else "not ready")
    if not is_ready:
        raise typer.Exit(FAILED)
