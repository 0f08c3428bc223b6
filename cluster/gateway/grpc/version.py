"""Version of the running server."""

from __future__ import annotations

import functools
from importlib import metadata


@functools.cache
def server_version() -> str:
    """Return the version of the installed package; ``0`` in a source tree that is not installed."""
    try:
        return metadata.version("quire")
    except metadata.PackageNotFoundError:
        return "0"
