"""Log of ops that PyTorch computes on a CPU although the library of C++ ops is loaded."""

from __future__ import annotations

import functools
import logging

from .library import is_available

_log = logging.getLogger(__name__)


@functools.cache
def log_fallback(op: str, reason: str) -> None:
    """Log once that PyTorch computes an op; without the library, whose absence is logged elsewhere, do nothing.

    Args:
        op: what is computed, a plural.
        reason: why no C++ op computes it.
    """
    if is_available():
        _log.info("PyTorch computes %s, which is slower: %s", op, reason)
