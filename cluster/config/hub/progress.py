"""Progress of downloads: huggingface_hub's bars on a terminal, a line in the log every ten seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

LOG_INTERVAL_S = 10.0

_log = logging.getLogger(__name__)


def download_bar(model_id: str, *, is_shown: bool = True) -> type[Any]:
    """Return the class of bars for `tqdm_class` of huggingface_hub.

    Args:
        is_shown: draw the bars on a terminal; False for calls that only ask which files there are.
    """
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    if is_shown and sys.stderr.isatty():
        return tqdm

    class LoggedProgress(tqdm):
        """A bar that is not drawn. Logs the bytes that have arrived."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Bytes are counted twice: as they arrive, and as they are written.
            self._counts_bytes = kwargs.get("unit") == "B" and not str(kwargs.get("name")).endswith(
                ".transfer"
            )
            self._logged_at = time.monotonic()
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]
            self.total = kwargs.get("total")  # tqdm sets no attributes of bars that are disabled
            self._num_done = 0.0

        def update(self, n: float | None = 1) -> None:
            self._num_done += n or 0
            now = time.monotonic()
            if self._counts_bytes and now - self._logged_at >= LOG_INTERVAL_S:
                self._logged_at = now
                _log.info("%s: %.2f of %.2f GB", model_id, self._num_done / 1e9, (self.total or 0) / 1e9)

    return LoggedProgress
