"""GroupRecovery: rebuilds a failed worker group, with a bounded number of attempts, while its step loop goes on."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable

from ...proto.errors import QuireError, RankFailed, ReplicaUnavailable, in_one_line
from .worker_group import Rebuilt, WorkerGroup

# Attempts to rebuild the group after one failure, and the delays before the second and later ones.
MAX_ATTEMPTS = 4
FIRST_DELAY_S = 0.5
# Time after a failure from which no further attempt begins: a vanished host does not come back soon.
MAX_RECOVERY_S = 60.0
# Failures in a time, after which the group is given up. A replica that fails more often serves nobody.
MAX_FAILURES = 10
FAILURE_WINDOW_S = 300.0

_log = logging.getLogger(__name__)


class GroupRecovery:
    """The recoveries of one worker group.

    Args:
        clock: monotonic time in seconds.
        wait: handles messages of gateways until the event is set or for so many seconds at most; raises to cancel the
            recovery.
        wake: ends such a wait, from any thread.

    Attributes:
        num_recoveries: completed.
    """

    def __init__(
        self,
        group: WorkerGroup,
        clock: Callable[[], float],
        wait: Callable[[threading.Event, float], None],
        wake: Callable[[], None],
    ) -> None:
        self.num_recoveries = 0
        self._group = group
        self._clock = clock
        self._wait = wait
        self._wake = wake
        self._failed_at: deque[float] = deque(maxlen=MAX_FAILURES)

    def recover(self, failure: RankFailed, epoch: int) -> Rebuilt:
        """Rebuild the group for plans of `epoch`.

        Raises:
            RankFailed: `failure`, extended by the reason why the group is given up.
        """
        now = self._clock()
        if len(self._failed_at) == MAX_FAILURES and now - self._failed_at[0] < FAILURE_WINDOW_S:
            since_s = now - self._failed_at[0]
            raise _given_up(failure, f"the ranks failed {MAX_FAILURES + 1} times in {since_s:.0f} s")
        self._failed_at.append(now)
        delay_s, problems = FIRST_DELAY_S, list[str]()
        for attempt in range(1, MAX_ATTEMPTS + 1):
            outcome = self._attempt(epoch)
            if isinstance(outcome, Rebuilt):
                self.num_recoveries += 1
                return outcome
            problems.append(in_one_line(outcome))
            _log.warning("attempt %d to rebuild the ranks failed: %s", attempt, outcome)
            if attempt == MAX_ATTEMPTS or self._clock() - now > MAX_RECOVERY_S:
                break
            self._wait_until(threading.Event(), delay_s)
            delay_s *= 2
        raise _given_up(
            failure, f"{len(problems)} attempts to rebuild the ranks failed, the last: {problems[-1]}"
        )

    def _attempt(self, epoch: int) -> Rebuilt | Exception:
        """Rebuild the group on a thread of its own; return what it returns, or its error."""
        done, outcomes = threading.Event(), list[Rebuilt | Exception]()

        def rebuild() -> None:
            try:
                outcomes.append(self._group.rebuild(epoch))
            except QuireError as error:
                outcomes.append(error)
            except Exception as error:
                _log.exception("rebuilding the ranks failed unexpectedly")
                outcomes.append(ReplicaUnavailable(in_one_line(error)))
            finally:
                done.set()
                self._wake()

        threading.Thread(target=rebuild, name="rebuild", daemon=True).start()
        self._wait_until(done, math.inf)
        return outcomes[0]

    def _wait_until(self, event: threading.Event, timeout_s: float) -> None:
        deadline = self._clock() + timeout_s
        while not event.is_set() and (left_s := deadline - self._clock()) > 0:
            self._wait(event, left_s)


def _given_up(failure: RankFailed, reason: str) -> RankFailed:
    problem = f"{failure.problem}; given up: {reason}"
    return RankFailed(
        failure.rank, problem, failure.step_id, failure.stage, is_step_error=failure.is_step_error
    )
