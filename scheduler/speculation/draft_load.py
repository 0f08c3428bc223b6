"""DraftLoad: times of the steps of about as many rows, and whether they may draft."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .draft_budget import DraftBudget
from .draft_run import MOST_CAUGHT_UP, STAKE, DraftRun, bounded
from .step_times import StepTimes

FloatArray = npt.NDArray[np.float64]

# Steps without drafts before the first run of steps with drafts, and after an interval of them: the intervals double.
_FIRST_PLAIN_STEPS, _PLAIN_STEPS = 32, 6
_MIN_INTERVAL_STEPS, _MAX_INTERVAL_STEPS = 64, 512
# The first steps of an engine, without drafts and with, are not measured: they take up to nine times as long as later
# ones, since memory is touched for the first time.
_COLD_STEPS, _COLD_DRAFTS = 24, 4
# Time of the tokens that the first one computes for the drafts, in later runs, relative to the first.
_WARM_SHARE = 0.5
# Steps without drafts that take longer than usual after one with drafts, until caches hold their data again.
_SETTLING_STEPS = 3
# Factor of the weight of earlier measurements of steps without drafts: half after 34 of them.
_PLAIN_DECAY = 0.98
# Tokens that take as long as what does not depend on their number, when the first step of a run computes some.
_PENDING_BASE = 128
# Most steps between choices while there is nothing to draft: 1 at first, and then one more each time.
_MOST_IDLE_STEPS = 16
# Factor of the weight of the times without drafts when more of them are measured.
_PLAIN_FADE = 0.4
# Credit that is kept for sequences that have not drafted yet: their text is unknown.
_RESERVE = 1.0
# How often no run is considered after one, per step that it lost, and at least: credit is spent over some time.
_PAUSE, _MIN_PAUSE = 3.0, 1
# Factor of the weight of the times with drafts when a run begins: the text or the machine may have changed.
_FADE = 0.25
# A step with drafts takes longer than one without. This share of the difference grows with the drafted tokens, as far
# as the measurements do not show it; the rest is the work around them.
_GROWING_SHARE = 0.5


class DraftLoad:
    """Measured times of steps without prompts, and the present run of steps with drafts.

    A run begins with the first steps of new sequences, whose text is unknown, or after a pause, if the budget has
    credit for it. It ends when it has lost, or if there is nothing to draft before it has saved anything.

    Args:
        budget: that of all loads.
    """

    def __init__(self, budget: DraftBudget) -> None:
        # By tokens, without the time of drafting.
        self._plain_times, self._drafted_times = StepTimes(_PLAIN_DECAY), StepTimes()
        self._draft_times = StepTimes()  # time that the ranks take to draft, by tokens of a row
        self._budget = budget
        self._num_plain_steps = _FIRST_PLAIN_STEPS  # to be measured before the next step with drafts
        self._num_cold_steps, self._num_cold_drafts = _COLD_STEPS, _COLD_DRAFTS  # left
        self._num_drafted_steps, self._interval = 0, _MIN_INTERVAL_STEPS  # planned since then, and at most
        self._pause_left = 0
        self._num_idle_steps = 1  # after the next choice that finds nothing to draft
        self._num_started = 0  # sequences when a run was last considered
        self._has_new_text = False  # sequences have started since the last run
        self._run: DraftRun | None = None
        # Seconds per pending token of the latest run, with _PENDING_BASE more of them; and the time, in steps without
        # drafts, for as many as `may_compute` was last asked for.
        self._pending_s = self._pending_steps = 0.0
        self._was_drafting = False  # the last step
        self._num_settling_steps = _SETTLING_STEPS  # left

    def is_due(self, num_started: int) -> bool:
        """Return whether drafts are to be considered for the next step.

        Args:
            num_started: sequences that have started so far.
        """
        if num_started != self._num_started:
            self._num_started, self._has_new_text = num_started, True
        if self._run is not None:
            return True
        if self._pause_left and not self._has_new_text:
            self._pause_left -= 1
            return False
        return self._budget.allows(STAKE if self._has_new_text else STAKE + _RESERVE)

    @property
    def may_run_soon(self) -> bool:
        """Return whether there is at least half of the credit for a run: slow first steps of an engine cost some."""
        return self._run is not None or self._budget.allows((STAKE + self._pending_steps) / 2)

    def may_compute(self, num_pending: int) -> bool:
        """Return whether steps draft, or there is credit for a run that first computes so many tokens for drafts."""
        if self._pending_s:
            num_steps = (num_pending + _PENDING_BASE) * self._pending_s / self._plain_times.at(1)
            self._pending_steps = min(num_steps, MOST_CAUGHT_UP)
        return self._run is not None or self._budget.allows(STAKE + self._pending_steps)

    @property
    def may_draft(self) -> bool:
        """Return whether the next step may draft: not if steps without drafts are to be measured."""
        return self._num_plain_steps == 0 and self._plain_times.is_known

    @property
    def knows_drafts(self) -> bool:
        return self._drafted_times.is_known

    @property
    def is_trial(self) -> bool:
        """Return whether the next step is one of the first of a run, or may begin one."""
        return self._run is None or self._run.is_trial

    def on_choice(self, *, has_drafts: bool, num_pending: int = 0) -> int:
        """Count a step for which drafts were considered; return the number of steps for which they need not be.

        Args:
            num_pending: tokens that the step computes for the drafts, of earlier steps and prompts.
        """
        if has_drafts:
            run = self._run or self._begin_run(num_pending)
            run.num_steps += 1
            self._num_idle_steps = 1
            self._num_drafted_steps += 1
            if self._num_drafted_steps >= self._interval:
                self._num_drafted_steps, self._num_plain_steps = 0, _PLAIN_STEPS
                self._plain_times.fade(_PLAIN_FADE)
                self._interval = min(2 * self._interval, _MAX_INTERVAL_STEPS)
        elif self._num_plain_steps:
            self._num_plain_steps -= 1
        else:
            num_idle_steps = self._num_idle_steps
            self._num_idle_steps = min(num_idle_steps + 1, _MOST_IDLE_STEPS)
            return num_idle_steps
        return 0

    def _begin_run(self, num_pending: int) -> DraftRun:
        self._run, self._has_new_text = DraftRun(num_pending), False
        self._drafted_times.fade(_FADE)
        self._draft_times.fade(_FADE)
        return self._run

    def _end_run(self, run: DraftRun) -> None:
        self._run = None
        self._budget.add(run.balance)
        self._pause_left = max(_MIN_PAUSE, int(-_PAUSE * run.balance))

    def relative_times(self, num_rows: int, counts: FloatArray, rounds: npt.NDArray[np.int64]) -> FloatArray:
        """Return the expected times of steps with some numbers of drafted tokens, relative to a step without.

        Args:
            counts: [n], expected drafted tokens of all rows.
            rounds: [n], drafted tokens of the row with the most.
        """
        plain_s, drafted = self._plain_times.at(num_rows), self._drafted_times
        if drafted.is_known:
            slope = _GROWING_SHARE * drafted.slope_from(num_rows, plain_s)
            seconds = drafted.seconds(num_rows + counts, slope)
        else:
            seconds = self._plain_times.seconds(num_rows + counts)
        if self._draft_times.is_known:
            seconds = seconds + self._draft_times.seconds(rounds)
        return seconds / plain_s

    def observe_plain(self, num_rows: int, seconds: float, num_steps: int = 1) -> None:
        """Record a step that was planned without drafts.

        Args:
            num_steps: that it stands for; only some are measured where drafts are off.
        """
        self._was_drafting = False
        if self._num_cold_steps > 0:
            self._num_cold_steps -= num_steps
            return
        if not self._num_settling_steps or not self._plain_times.is_known:
            self._plain_times.observe(num_rows, seconds)
            self._budget.add_plain_steps(num_steps)
            return
        self._num_settling_steps -= 1
        saved = 1.0 - seconds / self._plain_times.at(num_rows)
        if self._run is None:
            self._budget.add(bounded(saved))
        else:
            self._run.add(saved, saved)

    def observe_drafted(
        self,
        num_rows: int,
        num_drafted: int,
        num_rounds: int,
        num_sampled: int,
        seconds: float,
        draft_s: float,
    ) -> None:
        """Record a step that was planned with drafts; the arguments are those of DraftLengths.observe_drafted."""
        is_first, self._was_drafting = not self._was_drafting, True
        self._num_settling_steps = _SETTLING_STEPS
        run = self._run or DraftRun(0)  # the run may have ended while the step was in flight
        if self._num_cold_drafts:
            self._num_cold_drafts -= 1
            if is_first:
                self._pending_s = _WARM_SHARE * draft_s / (run.num_pending + _PENDING_BASE)
            return
        num_tokens, own_s = num_rows + num_drafted, max(0.0, seconds - draft_s)
        has_usual = self._drafted_times.is_known and not run.is_warm
        usual_s = self._drafted_times.at(num_tokens) if has_usual else own_s
        own_s = self._drafted_times.observe(num_tokens, own_s)
        plain_s = self._plain_times.at(num_rows)
        if is_first:  # which also computes the tokens that a pause has left
            usual_draft_s = self._draft_times.at(num_rounds) if self._draft_times.is_known else 0.0
            pending_s = max(0.0, draft_s - usual_draft_s)
            self._pending_s = pending_s / (run.num_pending + _PENDING_BASE)
            run.add_caught_up(pending_s / plain_s)
            draft_s = min(draft_s, usual_draft_s)
        elif num_rounds:
            draft_s = self._draft_times.observe(num_rounds, draft_s)
        gained = num_sampled / num_rows
        run.add(gained - (own_s + draft_s) / plain_s, gained - (min(own_s, usual_s) + draft_s) / plain_s)
        if self._run is None:
            self._budget.add(run.balance)
        elif run.has_lost or (not num_drafted and not run.has_gained):
            self._end_run(run)
