"""DraftLengths: chooses how many drafted tokens each row verifies, from measured acceptance and step times."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...proto.block_tables import IntArray, RowArray
from .draft_trials import DraftTrials
from .step_times import StepTimes

FloatArray = npt.NDArray[np.float64]

# Assumed share of drafted tokens that are accepted, and the number of trials of all rows for which this counts.
INITIAL_ACCEPTANCE = 0.7
_INITIAL_TRIALS = 8.0
# Trials of a row for which the share over all rows counts.
_PRIOR_TRIALS = 4.0
# Factors of the trials per step, of a row and of all: new ones count more, and what was given up is tried again.
_DECAY, _DECAY_OF_ALL = 0.95, 0.998
# Drafts must promise this much more than a step without: the price of a token near the present number is uncertain.
# Trials (DraftTrials) decide whether drafts pay at all. With 1.15, one sequence of the demo model drafted in a third
# of the steps in which drafts paid.
_MIN_GAIN = 1.02
# A step without drafts is planned at least every so many steps, to measure what drafts cost.
PLAIN_INTERVAL_STEPS = 100
# Most steps until drafts are considered again where none paid. The first pause takes one step, and each one that
# follows a pause twice as many as that: noise alone ends few drafts.
_MAX_PAUSE_STEPS = 16
# Most steps for which a choice holds while the rows stay: a choice takes 50 us, a step of the demo model 0.6 ms. A
# new choice holds for one step, and then for twice as many as before while it stays the same.
_MAX_CHOICE_STEPS = 8
# The expected times of drafts and of steps with drafts shrink by this factor per step of a pause, so that they are
# measured again.
_PAUSE_DECAY = 0.999
# A step with drafts takes longer than one without. This share of the difference grows with the drafted tokens, as far
# as the measurements do not show it; the rest is the work around them.
_GROWING_SHARE = 0.5


class DraftLengths:
    """The number of drafted tokens per row and step that maximizes the expected tokens per second.

    A drafted token is accepted if all before it were, each with the probability `acceptance` of its row: the i-th
    with acceptance^i (Leviathan et al., 2023). The tokens of all rows are taken in descending order of this
    probability, and as many of them as give the most expected tokens per second of the step that they make. With few
    rows a step takes as long for some more tokens. With many rows every token costs time, and only drafts that are
    almost certain are worth it. Whether drafts pay at all is measured: see DraftTrials.

    Args:
        num_rows: rows (batch slots).
        max_len: most drafted tokens per row and step.
    """

    def __init__(self, num_rows: int, max_len: int) -> None:
        self._max_len = max_len
        # By tokens, without the time of drafting.
        self._plain_times, self._drafted_times = StepTimes(), StepTimes()
        self._draft_times = StepTimes()  # time that the ranks take to draft, by tokens of a row
        self._trials_of_steps = DraftTrials()
        self._num_drafted_steps = 0  # since the last step without drafts
        self._num_pause_steps = self._pause_interval = 0  # steps left, and of the last pause
        self._choice: IntArray | None = None  # for the rows and sequences of `_choice_key`
        self._choice_key = b"", b""
        self._num_choice_steps = self._choice_interval = 0  # steps left, and of the whole choice
        self._num_undecayed_steps = 0
        self._was_drafting = self._is_first_draft = False  # the last step
        self._sequences = np.zeros(num_rows, np.int64)  # first step of the sequence that the counts are of
        self._accepted, self._trials = np.zeros(num_rows), np.zeros(num_rows)
        self._all_accepted, self._all_trials = 0.0, 0.0

    def acceptance(self, rows: RowArray) -> FloatArray:
        """Return the estimated probability that a drafted token of each row is accepted, after accepted ones."""
        prior = (self._all_accepted + INITIAL_ACCEPTANCE * _INITIAL_TRIALS) / (
            self._all_trials + _INITIAL_TRIALS
        )
        estimate: FloatArray = (self._accepted[rows] + prior * _PRIOR_TRIALS) / (
            self._trials[rows] + _PRIOR_TRIALS
        )
        return estimate

    def is_due(self, num_rows: int) -> bool:
        """Return whether `choose` is to be called for the next step without prompts, of this many rows.

        Where drafts do not pay, this call is all that they cost: `choose` takes 50 us, a step of the demo model 1 ms.
        """
        self._num_undecayed_steps += 1
        if self._num_pause_steps:
            self._num_pause_steps -= 1
        elif self._trials_of_steps.allow(num_rows):
            return True
        self._num_drafted_steps = 0
        return False

    def choose(
        self, rows: RowArray, first_steps: npt.NDArray[np.int64], limits: IntArray, most: int
    ) -> IntArray | None:
        """Return the most drafted tokens of each row of a step without prompts. Returns None if none has any.

        Args:
            rows: [n], rows that decode in the step.
            first_steps: [n], first step of each row's sequence.
            limits: [n], most drafted tokens that each row has room for.
            most: drafted tokens of all rows together.
        """
        chosen = None
        if most > 0 and self._plain_times.is_known and self._num_drafted_steps < PLAIN_INTERVAL_STEPS:
            chosen = self._held_choice(rows, first_steps, limits, most)
            if chosen is None:
                self._reset_changed(rows, first_steps)
                self._decay()
                chosen = self._best(rows, limits, most)
                self._hold(chosen, (rows.tobytes(), first_steps.tobytes()))
            if chosen is None:
                self._pause()
            else:
                self._pause_interval = 0
        self._num_drafted_steps = 0 if chosen is None else self._num_drafted_steps + 1
        return chosen

    def _pause(self) -> None:
        self._pause_interval = min(max(1, 2 * self._pause_interval), _MAX_PAUSE_STEPS)
        self._num_pause_steps = self._pause_interval
        self._draft_times.shrink(_PAUSE_DECAY**self._pause_interval)
        self._drafted_times.shrink(_PAUSE_DECAY**self._pause_interval)

    def _hold(self, chosen: IntArray | None, key: tuple[bytes, bytes]) -> None:
        """Keep a choice for the next steps."""
        before = self._choice if key == self._choice_key else None
        is_same = chosen is not None and before is not None and np.array_equal(chosen, before)
        is_same &= self._draft_times.is_known
        self._choice_interval = min(2 * self._choice_interval, _MAX_CHOICE_STEPS) if is_same else 1
        self._choice, self._choice_key, self._num_choice_steps = chosen, key, self._choice_interval

    def _held_choice(
        self, rows: RowArray, first_steps: npt.NDArray[np.int64], limits: IntArray, most: int
    ) -> IntArray | None:
        """Return the last choice if it still holds for these rows and limits, otherwise None."""
        self._num_choice_steps -= 1
        choice = self._choice
        if choice is None or self._num_choice_steps <= 0:
            return None
        if self._choice_key != (rows.tobytes(), first_steps.tobytes()):
            return None
        fits = not (choice > limits).any() and int(choice.sum()) <= most
        return choice if fits else None

    def _decay(self) -> None:
        """Let the outcomes count less for each step since the last call."""
        decay, decay_of_all = _DECAY**self._num_undecayed_steps, _DECAY_OF_ALL**self._num_undecayed_steps
        self._num_undecayed_steps = 0
        self._accepted *= decay
        self._trials *= decay
        self._all_accepted *= decay_of_all
        self._all_trials *= decay_of_all

    def _best(self, rows: RowArray, limits: IntArray, most: int) -> IntArray | None:
        """Return the most drafted tokens of each row by the estimates. Returns None if none pays."""
        places = np.arange(1, self._max_len + 1)
        odds = np.power.outer(self.acceptance(rows), places)  # [n, max_len]
        odds[places > limits[:, None]] = 0.0
        order = np.argsort(-odds, axis=None, kind="stable")[: min(most, np.count_nonzero(odds))]
        rates = self._rates(rows.size, odds.ravel()[order], order % self._max_len + 1)
        best = int(rates.argmax())
        if rates[best] < _MIN_GAIN * rates[0]:
            return None
        chosen: IntArray = np.bincount(order[:best] // self._max_len, minlength=rows.size).astype(np.int32)
        return chosen

    def _rates(self, num_rows: int, odds: FloatArray, places: npt.NDArray[np.int64]) -> FloatArray:
        """Return the expected tokens per second with the first 0, 1, ... of the drafted tokens, up to a factor."""
        tokens = num_rows + np.concatenate([[0.0], odds.cumsum()])
        plain_s, drafted = float(self._plain_times.seconds(num_rows)), self._drafted_times
        counts = num_rows + np.arange(1, tokens.size)
        if drafted.is_known:
            seconds = drafted.seconds(counts, _GROWING_SHARE * drafted.slope_from(num_rows, plain_s))
        else:
            seconds = self._plain_times.seconds(counts)
        if self._draft_times.is_known:
            seconds = seconds + self._draft_times.seconds(np.maximum.accumulate(places))
        rates: FloatArray = tokens / np.concatenate([[plain_s], seconds])
        return rates

    def observe(self, rows: RowArray, num_drafted: IntArray, num_accepted: IntArray) -> None:
        """Record the outcome of the drafts of distinct rows."""
        # The first rejected token is one trial; those after it are none.
        trials = np.minimum(num_accepted + 1, num_drafted)
        self._accepted[rows] += num_accepted
        self._trials[rows] += trials
        self._all_accepted += float(num_accepted.sum())
        self._all_trials += float(trials.sum())

    def observe_rate(self, num_rows: int, has_drafts: bool, num_tokens: int, seconds: float) -> None:
        """Record the tokens that a step without prompts gave its rows, before `observe_step`; see DraftTrials."""
        # The first draft after a pause includes tokens that the pause left.
        self._is_first_draft = has_drafts and not self._was_drafting
        self._was_drafting = has_drafts
        if self._is_first_draft:
            return
        self._trials_of_steps.observe(num_rows, has_drafts, num_tokens, seconds)

    def observe_step(self, num_tokens: int, seconds: float, draft_s: float, num_rounds: int) -> None:
        """Record the time of a step without prompts.

        Args:
            seconds: of the step as a whole.
            draft_s: part of it that the ranks took to draft `num_rounds` tokens per row, one after the other.
        """
        if not num_rounds:
            self._plain_times.observe(num_tokens, seconds)
            return
        self._drafted_times.observe(num_tokens, max(0.0, seconds - draft_s))
        if not self._is_first_draft:
            self._draft_times.observe(num_rounds, draft_s)

    def _reset_changed(self, rows: RowArray, first_steps: npt.NDArray[np.int64]) -> None:
        """Forget the outcomes of rows that have another sequence now."""
        changed = rows[self._sequences[rows] != first_steps]
        if changed.size:
            self._accepted[changed] = self._trials[changed] = 0.0
            self._sequences[rows] = first_steps
