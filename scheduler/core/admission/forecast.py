"""Forecast: predicts when a new request would be complete, and refuses it if that is past its deadline.

Steps are predicted to be as long as the recent ones. A request waits until the rows have made as many steps as the
waiting requests before it need: on average the running ones have half of their own left now, and those that run when
the request gets its row have as many left then.
"""

from __future__ import annotations

import math

from ....proto.errors import DeadlineExpired, Overloaded, QuireError
from ...sequences.sequence import Sequence
from ..queue.backlog import Job
from ..state import SchedulerState

# Bounds of the delay that is sent with a refusal.
MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0
# Share of its computing time that a request must have left over, because predictions are not exact.
MARGIN = 0.1
# A queue that is too long for this time is one of overload, not of a burst (as in CoDel, RFC 8289).
CONGESTION_S = 1.0
# Share of a request's time that it may then wait. Otherwise the queue would grow until only the shortest outputs are
# served: at 10 times the load that a replica can serve, goodput was 60 % of its peak.
CONGESTED_SHARE = 0.05
# At least this many steps, so that the rows never wait for requests.
CONGESTED_STEPS = 4


class Forecast:
    """Predictions for one scheduler's state."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        # Since when requests have found the queue too long, without a break of CONGESTION_S, and when the last did.
        self._congested_since, self._congested_at = math.inf, -math.inf

    def refusal(self, request_id: str, job: Job, deadline: float, now: float) -> QuireError | None:
        """Return the error with which to refuse a new request that cannot be complete in time, or None."""
        state, step_s, time_left_s = self._state, self._state.pace.step_s, deadline - now
        if error := self._hopeless(request_id, job, time_left_s):
            return error
        if not state.running and not state.waiting:
            return None
        queue_s, compute_s = self.queue_s(job), self._compute_s(job)
        total_s = queue_s + compute_s * (1 + MARGIN)
        is_too_long = queue_s > max(CONGESTED_SHARE * time_left_s, CONGESTED_STEPS * step_s)
        is_congested = self._is_congested(now, is_too_long=is_too_long)
        must_leave = is_congested and is_too_long and state.waiting.backlog.has_fair_share(job.tenant)
        if total_s <= time_left_s and not must_leave:
            return None
        return Overloaded(
            f"request {request_id} would wait {queue_s:.3g} s and then take {compute_s:.3g} s, "
            f"and its deadline is in {time_left_s:.3g} s",
            # The present queue is computed then: earlier, others take the room that there is.
            retry_after_s=_bounded(max(queue_s, total_s - time_left_s)),
        )

    def refusal_at_start(self, sequence: Sequence, now: float) -> QuireError | None:
        """Return the error with which to refuse a waiting sequence that is to get its row now, or None."""
        if sequence.deadline is None or sequence.has_run:
            return None
        job, time_left_s = self._state.waiting.backlog.job_of(sequence), sequence.deadline - now
        if not self._state.running:
            return self._hopeless(sequence.request_id, job, time_left_s)
        compute_s = self._compute_s(job)
        if compute_s <= time_left_s:
            return None
        return Overloaded(
            f"request {sequence.request_id} has waited, and would take {compute_s:.3g} s of the "
            f"{time_left_s:.3g} s to its deadline",
            retry_after_s=self.retry_after_s(job),
        )

    def retry_after_s(self, job: Job) -> float | None:
        """Return the time after which a request may be sent again that a full queue refused; None if unknown."""
        return _bounded(self.queue_s(job)) if self._state.pace.step_s else None

    def queue_s(self, job: Job) -> float:
        """Return the predicted time until a request that arrives now gets a row."""
        state, before = self._state, self._state.waiting.backlog.before(job)
        num_rows, num_running, num_steps = float(state.rows.num_rows), len(state.running), 0.0
        if (
            num_running
        ):  # no more sequences than have room for their KV, if they hold as much as the running ones
            num_rows = min(
                num_rows, num_running * state.blocks.num_blocks / max(state.blocks.num_held_blocks, 1)
            )
        if before.num_sequences + num_running + job.num_sequences > num_rows:
            num_steps = before.row_steps / num_rows
        return max(num_steps * state.pace.step_s, self._prefill_s(before.num_prompt_tokens))

    def _is_congested(self, now: float, *, is_too_long: bool) -> bool:
        """Return whether the queue has been too long for CONGESTION_S.

        Args:
            is_too_long: a request that arrives now finds it so.
        """
        if now - self._congested_at > CONGESTION_S:
            self._congested_since = now
        if is_too_long:
            self._congested_at = now
        return now - self._congested_since > CONGESTION_S

    def _compute_s(self, job: Job) -> float:
        """Return the predicted time of a job from its row to its last token."""
        return self._prefill_s(job.num_prompt_tokens) + max(job.num_steps - 1, 0.0) * self._state.pace.step_s

    def _prefill_s(self, num_tokens: float) -> float:
        """Return the predicted time in which prompts are computed, which takes whole steps if it is one prompt."""
        per_s = self._state.costs.prefill_tokens_per_s or math.inf
        return max(self._num_prefills(num_tokens) * self._state.pace.step_s, num_tokens / per_s)

    def _num_prefills(self, num_tokens: float) -> int:
        budget: int = self._state.config.scheduler.max_num_batched_tokens
        return math.ceil(num_tokens / budget)

    def _hopeless(self, request_id: str, job: Job, time_left_s: float) -> DeadlineExpired | None:
        """Return the error of a request that would be too late even if its steps were the shortest of late, or None.

        While nothing runs, this alone is checked. Predictions that became too long while the machine was busy with
        other work would otherwise refuse all requests, and no step would ever show that they are wrong.
        """
        num_steps = self._num_prefills(job.num_prompt_tokens) + max(job.num_steps - 1, 0.0)
        needed_s = num_steps * self._state.pace.least_step_s
        if needed_s <= time_left_s:
            return None
        return DeadlineExpired(
            f"request {request_id}: computing it takes {needed_s:.3g} s, and its deadline is in {time_left_s:.3g} s"
        )


def _bounded(retry_s: float) -> float:
    return min(max(retry_s, MIN_RETRY_S), MAX_RETRY_S)
