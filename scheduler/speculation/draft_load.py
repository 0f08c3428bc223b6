"""DraftLoad: times of the steps of about as many rows, and whether they may draft."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .draft_budget import DraftBudget
from .step_times import StepTimes

FloatArray = npt.NDArray[np.float64]

# Steps without drafts before the first run of steps with drafts, and after an interval of them: the intervals double.
_FIRST_PLAIN_STEPS, _PLAIN_STEPS = 8, 6
_MIN_INTERVAL_STEPS, _MAX_INTERVAL_STEPS = 64, 512
# Steps without drafts that take longer than usual after one with drafts, until caches hold their data again.
_SETTLING_STEPS = 3
# Factor of the weight of earlier measurements of steps without drafts: half after 34 of them.
_PLAIN_DECAY = 0.98
# Most steps between choices while there is nothing to draft: 1 at first, and then one more each time.
_MOST_IDLE_STEPS = 16
# Factor of the weight of the times without drafts when more of them are measured: at first, since the first steps of
# an engine are slow, and later.
_FIRST_PLAIN_FADE, _PLAIN_FADE = 0.1, 0.4
# What a run of steps with drafts may lose from its best moment on, in steps without drafts: at first, and after it
# has saved more than the difference.
_STAKE, _MOST_STAKE = 2.0, 6.0
# Credit that is kept for sequences that have not drafted yet: their text is unknown.
_RESERVE = 1.0
# The first steps of a run draft as if its text were better than the text before.
_TRIAL_STEPS = 4
# Steps without drafts after a run, per step that it lost, and at least: credit is spent over some time.
_PAUSE, _MIN_PAUSE_STEPS = 12.0, 4
# Factor of the weight of the times with drafts when a run begins: the text or the machine may have changed.
_FADE = 0.25
# A step with drafts takes longer than one without. This share of the difference grows with the drafted tokens, as far
# as the measurements do not show it; the rest is the work around them.
_GROWING_SHARE = 0.5
# Most steps without drafts that a step counts as losing, and that the tokens of a pause cost: other processes delay
# single steps, and kernels may be compiled in the first one.
_MOST_LOST, _MOST_CAUGHT_UP = 2.0, 8.0


class DraftLoad:
    """Measured times of steps without prompts, and the present run of steps with drafts.

    A run begins with the first steps of new sequences, whose text is unknown, or after a pause, if the budget has
    credit for it. It ends when it has lost its stake since its best moment (Page's test for a change of the mean,
    1954), or if there is nothing to draft before it has saved anything.

    Args:
        budget: that of all loads.
    """

    def __init__(self, budget: DraftBudget) -> None:
        # By tokens, without the time of drafting.
        self._plain_times, self._drafted_times = StepTimes(_PLAIN_DECAY), StepTimes()
        self._draft_times = StepTimes()  # time that the ranks take to draft, by tokens of a row
        self._budget = budget
        self._num_plain_steps = _FIRST_PLAIN_STEPS  # to be measured before the next step with drafts
        self._num_drafted_steps, self._interval = 0, _MIN_INTERVAL_STEPS  # planned since then, and at most
        self._num_pause_steps = 0  # left
        self._num_idle_steps = 1  # after the next choice that finds nothing to draft
        self._num_started = 0  # sequences when a run was last considered
        self._has_new_text = False  # sequences have started since the last run
        self._is_running = False
        self._num_run_steps = 0
        self._saved = self._stake = 0.0  # by the run, and what it may still lose, in steps without drafts
        self._debt = 0.0  # for what its first step computed of the steps before
        self._was_drafting = False  # the last step
        self._num_settling_steps = _SETTLING_STEPS  # left

    def is_due(self, num_started: int) -> bool:
        """Return whether drafts are to be considered for the next step; called once per step.

        Args:
            num_started: sequences that have started so far.
        """
        if num_started != self._num_started:
            self._num_started, self._has_new_text = num_started, True
        if self._is_running:
            return True
        if self._num_pause_steps and not self._has_new_text:
            self._num_pause_steps -= 1
            return False
        return self._budget.allows(_STAKE if self._has_new_text else _STAKE + _RESERVE)

    @property
    def may_run(self) -> bool:
        """Return whether steps draft, or may do so with the next new sequence."""
        return self._is_running or self._budget.allows(_STAKE)

    @property
    def may_run_soon(self) -> bool:
        """Return whether there is at least half of the credit for a run: slow first steps of an engine cost some."""
        return self._is_running or self._budget.allows(_STAKE / 2)

    @property
    def may_draft(self) -> bool:
        """Return whether the next step may draft: not if steps without drafts are to be measured."""
        return self._num_plain_steps == 0

    @property
    def knows_drafts(self) -> bool:
        return self._drafted_times.is_known

    @property
    def is_trial(self) -> bool:
        """Return whether the next step is one of the first of a run, or may begin one."""
        return self._num_run_steps < _TRIAL_STEPS

    def on_choice(self, *, has_drafts: bool) -> int:
        """Count a step for which drafts were considered; return the number of steps for which they need not be."""
        if has_drafts:
            if not self._is_running:
                self._begin_run()
            self._num_idle_steps = 1
            self._num_run_steps += 1
            self._num_drafted_steps += 1
            if self._num_drafted_steps >= self._interval:
                self._num_drafted_steps, self._num_plain_steps = 0, _PLAIN_STEPS
                is_first = self._interval == _MIN_INTERVAL_STEPS
                self._plain_times.fade(_FIRST_PLAIN_FADE if is_first else _PLAIN_FADE)
                self._interval = min(2 * self._interval, _MAX_INTERVAL_STEPS)
        elif self._num_plain_steps:
            self._num_plain_steps -= 1
        else:
            num_idle_steps = self._num_idle_steps
            self._num_idle_steps = min(num_idle_steps + 1, _MOST_IDLE_STEPS)
            return num_idle_steps
        return 0

    def _begin_run(self) -> None:
        self._is_running, self._has_new_text = True, False
        self._num_run_steps = 0
        self._saved, self._stake, self._debt = 0.0, _STAKE, 0.0
        self._drafted_times.fade(_FADE)
        self._draft_times.fade(_FADE)

    def _end_run(self) -> None:
        self._is_running = False
        self._num_run_steps = 0
        saved = self._saved - self._debt
        self._budget.add(saved)
        self._num_pause_steps = max(_MIN_PAUSE_STEPS, int(-_PAUSE * saved))

    def _add_to_run(self, saved: float) -> None:
        self._saved += saved
        self._stake = min(self._stake + saved, _MOST_STAKE)

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
        if not self._num_settling_steps or not self._plain_times.is_known:
            self._plain_times.observe(num_rows, seconds)
            self._budget.add_plain_steps(num_steps)
            return
        self._num_settling_steps -= 1
        saved = 1.0 - seconds / self._plain_times.at(num_rows)
        saved = min(max(saved, -_MOST_LOST), _MOST_LOST)
        if self._is_running:
            self._add_to_run(saved)
        else:
            self._budget.add(saved)

    def observe_drafted(
        self,
        num_rows: int,
        num_drafted: int,
        num_rounds: int,
        num_sampled: int,
        seconds: float,
        draft_s: float,
    ) -> None:
        """Record a step that was planned with drafts; the arguments are those of DraftLengths.observe_step."""
        is_first, self._was_drafting = not self._was_drafting, True
        self._num_settling_steps = _SETTLING_STEPS
        counted_s = self._drafted_times.observe(num_rows + num_drafted, max(0.0, seconds - draft_s))
        if not self._plain_times.is_known:
            return
        plain_s = self._plain_times.at(num_rows)
        if is_first:  # which also computes the tokens that a pause has left
            usual_s = self._draft_times.at(num_rounds) if self._draft_times.is_known else 0.0
            self._debt = min(self._debt + max(0.0, draft_s - usual_s) / plain_s, _MOST_CAUGHT_UP)
            counted_s += min(draft_s, usual_s)
        elif num_rounds:
            counted_s += self._draft_times.observe(num_rounds, draft_s)
        saved = max(num_sampled / num_rows - counted_s / plain_s, -_MOST_LOST)
        self._add_to_run(saved)
        has_nothing_to_try = not num_drafted and self._stake <= _STAKE
        if self._is_running and (self._stake <= 0.0 or has_nothing_to_try):
            self._end_run()
