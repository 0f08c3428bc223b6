"""DraftLoad: times of the steps of about as many rows, and whether they may draft."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .draft_budget import DraftBudget
from .step_times import StepTimes

FloatArray = npt.NDArray[np.float64]

# Steps without drafts before the first with drafts, and after an interval of steps with drafts. The intervals double.
_FIRST_PLAIN_STEPS, _PLAIN_STEPS = 2, 4
_MIN_INTERVAL_STEPS, _MAX_INTERVAL_STEPS = 16, 256
# Factor of the weight of the times without drafts when more of them are measured.
_PLAIN_FADE = 0.8
# Most steps until drafts are considered again where none paid. The first pause takes one step, and each one that
# follows a pause twice as many as that: noise alone ends few drafts.
_MAX_PAUSE_STEPS = 16
# Steps that draft against the estimates, one after the other: a first one has more to compute.
_PROBE_STEPS = 5
# Factor of the weight of the times with drafts when a probe begins: the text or the machine may have changed.
_FADE = 0.25
# A step with drafts takes longer than one without. This share of the difference grows with the drafted tokens, as far
# as the measurements do not show it; the rest is the work around them.
_GROWING_SHARE = 0.5
# Most steps without drafts that a step with drafts counts as losing: other processes delay single steps.
_MOST_LOST = 2.0


class DraftLoad:
    """Measured times of steps without prompts, and the budget of drafts."""

    def __init__(self) -> None:
        # By tokens, without the time of drafting.
        self._plain_times, self._drafted_times = StepTimes(), StepTimes()
        self._draft_times = StepTimes()  # time that the ranks take to draft, by tokens of a row
        self._budget = DraftBudget()
        self._num_plain_steps = _FIRST_PLAIN_STEPS  # to be measured before the next step with drafts
        self._num_drafted_steps, self._interval = 0, _MIN_INTERVAL_STEPS  # planned since then, and at most
        self._num_pause_steps = self._pause_interval = 0  # steps left, and of the last pause
        self._num_probe_steps = 0  # left
        self._was_drafting = False  # the last step

    def is_due(self) -> bool:
        """Return whether drafts are to be considered for the next step; called once per step."""
        if self._num_pause_steps:
            self._num_pause_steps -= 1
            return False
        return not self._budget.is_spent or self._num_probe_steps > 0

    @property
    def may_draft(self) -> bool:
        """Return whether the next step may draft: not if steps without drafts are to be measured."""
        return self._num_plain_steps == 0

    @property
    def knows_drafts(self) -> bool:
        return self._drafted_times.is_known

    def begin_probe(self) -> bool:
        """Return whether the next step is to draft although the estimates speak against it."""
        if not self._num_probe_steps and self._budget.allows_probe:
            self._num_probe_steps = _PROBE_STEPS
            self._drafted_times.fade(_FADE)
            self._draft_times.fade(_FADE)
        return self._num_probe_steps > 0

    def on_choice(self, *, has_drafts: bool) -> None:
        """Count a step for which drafts were considered."""
        if has_drafts:
            self._num_probe_steps = max(0, self._num_probe_steps - 1)
            self._pause_interval = 0
            self._num_drafted_steps += 1
            if self._num_drafted_steps >= self._interval:
                self._num_drafted_steps, self._num_plain_steps = 0, _PLAIN_STEPS
                self._interval = min(2 * self._interval, _MAX_INTERVAL_STEPS)
                self._plain_times.fade(_PLAIN_FADE)
        elif self._num_plain_steps:
            self._num_plain_steps -= 1
        else:
            self._num_drafted_steps = 0
            self._budget.end_run()
            self._pause_interval = min(max(1, 2 * self._pause_interval), _MAX_PAUSE_STEPS)
            self._num_pause_steps = self._pause_interval

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

    def observe_plain(self, num_rows: int, seconds: float) -> None:
        """Record a step that was planned without drafts."""
        # The time until a result includes applying the result before, which takes longer with drafts.
        if not self._was_drafting or not self._plain_times.is_known:
            self._plain_times.observe(num_rows, seconds)
        self._was_drafting = False
        self._budget.add_plain_step()

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
        counted_s = self._drafted_times.observe(num_rows + num_drafted, max(0.0, seconds - draft_s))
        if not self._plain_times.is_known:
            return
        plain_s = self._plain_times.at(num_rows)
        if is_first:  # which also computes the tokens that a pause has left
            usual_s = self._draft_times.at(num_rounds) if self._draft_times.is_known else 0.0
            self._budget.add_catch_up(max(0.0, draft_s - usual_s) / plain_s)
            counted_s += min(draft_s, usual_s)
        elif num_rounds:
            counted_s += self._draft_times.observe(num_rounds, draft_s)
        self._budget.add_drafted_step(max(num_sampled / num_rows - counted_s / plain_s, -_MOST_LOST))
