"""The file of Ray's token, the shared secret of a cluster's nodes, which lets its holder run code on all of them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

TOKEN_FILE = "~/.ray/auth_token"

_OTHERS = 0o077

_log = logging.getLogger(__name__)


def has_token_file() -> bool:
    return _path().is_file()


def restrict_token_file() -> None:
    """Make Ray's token file readable for its owner alone. `ray get-auth-token --generate` lets everyone read it.

    Does nothing if there is none, or if it belongs to somebody else.
    """
    path = _path()
    try:
        state = path.stat()
        if state.st_uid != os.geteuid() or not state.st_mode & _OTHERS:
            return
        path.chmod(0o600)
    except OSError:
        return
    _log.warning("other users could read %s, Ray's token; its mode is 600 now", path)


def _path() -> Path:
    return Path(TOKEN_FILE).expanduser()
