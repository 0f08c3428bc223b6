"""Logging setup of quire's server processes."""

from __future__ import annotations

import logging

from .log_limit import RepeatLimit


def log_to_stderr() -> None:
    """Log warnings of all libraries, and quire's own records from INFO on, to standard error.

    Repeated warnings and errors are limited, so that no caller can fill the disk with them.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("quire").setLevel(logging.INFO)
    for handler in logging.getLogger().handlers:
        handler.addFilter(RepeatLimit())
