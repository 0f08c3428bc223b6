"""Logging setup of quire's server processes."""

from __future__ import annotations

import logging


def log_to_stderr() -> None:
    """Log warnings of all libraries, and quire's own records from INFO on, to standard error."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("quire").setLevel(logging.INFO)
