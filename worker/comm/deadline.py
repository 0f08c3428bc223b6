"""Calls with a deadline, for functions of libraries that may block forever."""

from __future__ import annotations

import threading
from collections.abc import Callable


def ends_within(
    timeout_s: float, function: Callable[[], object], meanwhile: Callable[[], object] = lambda: None
) -> bool:
    """Call `function` on a daemon thread of its own and wait for it at most `timeout_s`.

    Args:
        meanwhile: called on this thread when the other one has been started; may be what `function` waits for.

    Returns:
        whether it has ended. If not, the thread goes on, at most until the process ends.

    Raises:
        Exception: the function's own, if it ended in time.
    """
    errors: list[Exception] = []

    def call() -> None:
        try:
            function()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    meanwhile()
    thread.join(timeout_s)
    if thread.is_alive():
        return False
    if errors:
        raise errors[0]
    return True
