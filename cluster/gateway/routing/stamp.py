"""Stamps of an operator's changes, by which the latest one wins without a central record."""

from __future__ import annotations

import secrets
import time


def new_stamp() -> str:
    """Return a text that sorts after those of earlier calls, on clocks that agree, and is unique."""
    return f"{time.time_ns():020d}-{secrets.token_hex(4)}"
