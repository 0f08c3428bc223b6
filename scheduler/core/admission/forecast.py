"""Forecast: predicts when a new request would be complete, and refuses it if that is past its deadline.

The replica is a queue with as many servers as rows, or as many as the KV memory has room for; the waiting requests
before the new one are served in parts of a step per row. Times of steps and lengths of outputs are learned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ....proto.errors import DeadlineExpired, Overloaded, QuireError
from ...sequences.sequence import Sequence
from ..state.state import SchedulerState, row_of
from ..waiting.backlog import Job, Work

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


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted times of a request, in seconds.

    Attributes:
        queue_s: until it gets a row.
        alone_s: that it takes on a replica without other requests.
        compute_s: from its row to its last token.
    """

    queue_s: float
    alone_s: float
    compute_s: float

    @property
    def total_s(self) -> float:
        return self.queue_s + self.compute_s * (1 + MARGIN)


class Forecast:
    """Predictions for one scheduler's state."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._running = Work()
        self._running_at_step = -1
        # Since when requests have found the queue too long, without a break of CONGESTION_S, and when the last did.
        self._congested_since, self._congested_at = math.inf, -math.inf

    def refusal(self, request_id: str, job: Job, time_left_s: float, now: float) -> QuireError | None:
        """Return the error with which to refuse a new request that cannot be complete in time, or None."""
        if not self._state.step_costs.has_measured:
            return None
        if not self._state.running and not self._state.waiting:
            return _hopeless(request_id, self._least_s(job), time_left_s)
        predicted = self.predict(job)
        if error := _hopeless(request_id, predicted.alone_s, time_left_s):
            return error
        is_too_long = predicted.queue_s > self._congested_s(time_left_s)
        is_congested = self._is_congested(now, is_too_long=is_too_long)
        must_leave = is_congested and is_too_long and self._state.waiting.backlog.has_fair_share(job.tenant)
        if predicted.total_s <= time_left_s and not must_leave:
            return None
        return Overloaded(
            f"request {request_id} would wait {predicted.queue_s:.3g} s and then take {predicted.compute_s:.3g} s, "
            f"and its deadline is in {time_left_s:.3g} s",
            retry_after_s=self._retry_s(predicted, time_left_s),
        )

    def _congested_s(self, time_left_s: float) -> float:
        """Return the longest time that a request may wait while the queue is congested."""
        return max(CONGESTED_SHARE * time_left_s, CONGESTED_STEPS * self._state.step_costs.mean_s)

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

    def retry_after_s(self, job: Job) -> float | None:
        """Return the time after which a request may be sent again that a full queue refused; None if unknown."""
        if not self._state.step_costs.has_measured:
            return None
        return min(max(self.predict(job).queue_s, MIN_RETRY_S), MAX_RETRY_S)

    def refusal_at_start(self, sequence: Sequence, time_left_s: float) -> QuireError | None:
        """Return the error with which to refuse a waiting sequence that is to get its row now, or None."""
        if not self._state.step_costs.has_measured:
            return None
        job = self._state.waiting.backlog.job_of(sequence)
        if not self._state.running:
            return _hopeless(sequence.request_id, self._least_s(job), time_left_s)
        num_rows = min(len(self._state.running) + job.num_sequences, self._state.rows.num_rows)
        compute_s = self._compute_s(job, num_rows, self._state.step_costs.mean_prompt_tokens)
        if compute_s <= time_left_s:
            return None
        return Overloaded(
            f"request {sequence.request_id} has waited, and would take {compute_s:.3g} s of the "
            f"{time_left_s:.3g} s to its deadline",
            retry_after_s=self.retry_after_s(job),
        )

    def predict(self, job: Job) -> Prediction:
        """Return the times of a request that arrives now."""
        before, running = self._state.waiting.backlog.before(job), self._running_work()
        num_rows = self._num_rows(before, running, job)
        num_prompt_tokens = self._prompt_tokens_per_step(before, job, num_rows)
        return self._predict(before, running, job, num_rows, num_prompt_tokens)

    def _prompt_tokens_per_step(self, before: Work, job: Job, num_rows: float) -> float:
        """Return the prompt tokens that are computed in each step beside the decoding rows."""
        # In the long run the rows take in prompt tokens at the rate of their steps.
        per_row_step = (before.num_prompt_tokens + job.num_prompt_tokens) / max(
            before.row_steps + job.row_steps, 1.0
        )
        return min(self._state.step_costs.mean_prompt_tokens, num_rows * per_row_step)

    def _predict(
        self, before: Work, running: Work, job: Job, num_rows: float, num_prompt_tokens: float
    ) -> Prediction:
        queue_s = self._queue_s(before, running, job, num_rows, num_prompt_tokens)
        at_once = min(num_rows, before.num_sequences + running.num_sequences + job.num_sequences)
        compute_s = self._compute_s(job, at_once, num_prompt_tokens)
        alone_s = min(compute_s, self._compute_s(job, job.num_sequences))
        return Prediction(queue_s, alone_s, compute_s)

    def _retry_s(self, predicted: Prediction, time_left_s: float) -> float:
        """Return the time until the present queue is computed: earlier, others take the room that there is."""
        return min(max(predicted.queue_s, predicted.total_s - time_left_s, MIN_RETRY_S), MAX_RETRY_S)

    def _num_rows(self, before: Work, running: Work, job: Job) -> float:
        """Return the number of sequences that run at once: of rows, or of those whose KV there is room for."""
        blocks, rows = self._state.blocks, self._state.rows
        num_sequences = before.num_sequences + running.num_sequences + job.num_sequences
        mean_tokens = (before.num_kv_tokens + running.num_kv_tokens + job.num_kv_tokens) / num_sequences
        in_memory = blocks.num_blocks * blocks.block_size / max(blocks.layout.num_slots(mean_tokens), 1.0)
        # What is left of a partition is of no use to the others: half a sequence on average.
        in_memory = max(float(blocks.num_partitions), in_memory - (blocks.num_partitions - 1) / 2)
        return max(1.0, min(float(rows.num_rows), in_memory))

    def _queue_s(
        self, before: Work, running: Work, job: Job, num_rows: float, num_prompt_tokens: float
    ) -> float:
        """Return the time until all the work before a job is done or has a row.

        Args:
            num_prompt_tokens: prompt tokens in each step beside the decoding rows.
        """
        costs, budget = self._state.step_costs, self._state.config.scheduler.max_num_batched_tokens
        prompt_s = before.num_prompt_tokens / budget * costs.predict_s(running.num_sequences, budget)
        if before.num_sequences + running.num_sequences + job.num_sequences <= num_rows:
            return prompt_s
        # Jobs start one after the other on the first free row. When the last of those before it starts, the rows
        # still have half a job left on average.
        num_steps = (before.row_steps + running.row_steps) / num_rows
        half_job = before.row_steps / before.num_sequences / 2 if before.num_sequences >= 1 else num_steps
        step_s = costs.predict_s(num_rows, num_prompt_tokens)
        return max(prompt_s, (num_steps - half_job) * step_s, 0.0)

    def _compute_s(self, job: Job, num_rows: float, num_prompt_tokens: float = 0.0) -> float:
        """Return the time of a job whose steps decode `num_rows` rows and compute prompts of others."""
        step_s = self._state.step_costs.predict_s(num_rows, num_prompt_tokens)
        return self._prefill_s(job, num_rows) + max(job.num_steps - 1, 0.0) * step_s

    def _least_s(self, job: Job) -> float:
        """Return the time of a job if its steps are as short as the shortest of late.

        Used while nothing else runs. Predictions that became too long while the machine was busy with other work
        would otherwise refuse all requests, and no step would ever show that they are wrong.
        """
        num_prefills = self._num_prefills(job)
        return (num_prefills + max(job.num_steps - 1, 0.0)) * self._state.step_costs.least_s

    def _num_prefills(self, job: Job) -> int:
        return math.ceil(job.num_prompt_tokens / self._state.config.scheduler.max_num_batched_tokens)

    def _prefill_s(self, job: Job, num_rows: float) -> float:
        num_steps = self._num_prefills(job)
        return num_steps * self._state.step_costs.predict_s(
            num_rows, job.num_prompt_tokens / max(num_steps, 1)
        )

    def _running_work(self) -> Work:
        """Return the work that running sequences have left; made once per step: 30 us for 64 rows."""
        state = self._state
        if self._running_at_step == state.in_flight.next_id:
            return self._running
        self._running_at_step = state.in_flight.next_id
        num_running, num_tokens = len(state.running), state.rows.num_scheduled_tokens
        work = self._running = Work(num_sequences=num_running, num_kv_tokens=num_tokens)
        if num_running:
            work.row_steps = float(state.expected_steps_of_rows().sum())
            work.num_kv_tokens += work.row_steps / 2
        work.num_prompt_tokens = sum(
            len(sequence.token_ids) - int(state.rows.num_scheduled[row_of(sequence)])
            for sequence in state.prefilling
        )
        return work


def _hopeless(request_id: str, needed_s: float, time_left_s: float) -> DeadlineExpired | None:
    """Return the error of a request that would be too late even alone, or None."""
    if needed_s <= time_left_s:
        return None
    return DeadlineExpired(
        f"request {request_id}: computing it takes {needed_s:.3g} s, and its deadline is in {time_left_s:.3g} s"
    )
