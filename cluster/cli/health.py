"""`quire health`."""

from __future__ import annotations

import typer

from .connection import DEFAULT_TARGET, Target, TlsCa, connect
from .exit_status import FAILED


def health(target: Target = DEFAULT_TARGET, tls_ca: TlsCa = None) -> None:
    """Print ready or not ready, with exit status 0 or 1. Needs no token, for use in probes.

    Example: `quire health --target 127.0.0.1:50051`
    """
    with connect(target, None, tls_ca) as client:
        is_ready = client.is_ready()
    print("ready" if is_ready else "not ready")
    if not is_ready:
        raise typer.Exit(FAILED)
