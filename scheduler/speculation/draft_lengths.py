"""DraftLengths: chooses how many drafted tokens each row verifies, from measured acceptance and step times."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...proto.block_tables import IntArray, RowArray
from .draft_budget import DraftBudget
from .draft_load import DraftLoad
from .row_shares import RowShares

FloatArray = npt.NDArray[np.float64]

# Assumed probabilities, until they are measured: that a drafted token is accepted, and that a row drafts if it may.
INITIAL_ACCEPTANCE, _INITIAL_PROPOSALS = 0.7, 1.0
# Expected speed over that without drafts below which the first steps of a run do not trust the estimates of its text.
_MIN_GAIN = 1.02
# Most drafted tokens of a row in the first steps of a run that is not expected to pay: six cost twice as much.
_TRIAL_LEN = 3
# Most rows of a step with drafts on a CPU. The linear layers of more rows are bound by arithmetic (8 rows of float32
# with AVX2, at 240 GFLOP/s and 57 GB/s), so a drafted token costs as much as one of another sequence.
MOST_ROWS_ON_CPU = 8
# Most steps for which a choice holds while the rows stay: a choice takes 50 us, a step of the demo model 0.6 ms. A
# new choice holds for one step, and then for twice as many as before while it stays the same.
_MAX_CHOICE_STEPS = 8
# Steps without drafts that are all measured, at first and after each step with drafts, and then one in so many: a
# measurement takes 1 % of a step of the demo model.
_MEASURED_STEPS, _MEASURED_INTERVAL = 40, 4
# Steps after which a run that was not to begin yet is considered again.
_CHECK_INTERVAL = 4


class DraftLengths:
    """The number of drafted tokens per row and step that maximizes the expected tokens per second.

    A drafted token is accepted if all before it were, each with the probability `acceptance` of its row: the i-th
    with acceptance^i (Leviathan et al., 2023). The tokens of all rows are taken in descending order of this
    probability, and as many of them as give the most expected tokens per second of the step that they make. With few
    rows a step takes as long for some more tokens. With many rows every token costs time, and only drafts that are
    almost certain are worth it (Liu et al., SmartSpec, 2024). Times are measured for each load apart: loads are told
    apart by the number of rows, to a factor of two. What drafts may cost is bounded; see DraftBudget.

    Args:
        num_rows: rows (batch slots).
        max_len: most drafted tokens per row and step.
        most_rows: steps of more rows have no drafts; None for no limit.
        needs_states: drafts of a row need the hidden states of all of its steps; see `keeps_states`.

    Attributes:
        needs_states: as given; read-only.
    """

    def __init__(
        self, num_rows: int, max_len: int, most_rows: int | None = None, *, needs_states: bool = False
    ) -> None:
        self._max_len = max_len
        self._most_rows = num_rows if most_rows is None else most_rows
        self._loads: dict[int, DraftLoad] = {}
        self._budget = DraftBudget()
        self.needs_states, self._keeps_states = needs_states, True
        self._kept_since = 0  # step from which on hidden states are kept
        self._choice: IntArray | None = None  # for the rows and sequences of `_choice_key`
        self._choice_key = b"", b""
        self._num_choice_steps = self._choice_interval = 0  # steps left, and of the whole choice
        self._num_undecayed_steps = 0
        self._num_unchecked_steps = 0  # left of those for which drafts are not considered
        self._num_measured_steps = _MEASURED_STEPS  # left of those that are all measured
        self._sequences = np.zeros(num_rows, np.int64)  # first step of the sequence that the counts are of
        self._num_computed = np.zeros(num_rows, np.int32)  # tokens of each row when it drafted last
        self._accepted = RowShares(num_rows, INITIAL_ACCEPTANCE)
        self._proposed = RowShares(num_rows, _INITIAL_PROPOSALS)
        # Rows, drafted and accepted tokens of the steps that are not counted yet.
        self._outcomes: list[tuple[RowArray, IntArray, IntArray]] = []

    def acceptance(self, rows: RowArray) -> FloatArray:
        """Return the estimated probability that a drafted token of each row is accepted, after accepted ones."""
        self._count_outcomes()
        return self._accepted.of(rows)

    def keeps_states(self, step_id: int, num_rows: int, new_lens: list[int]) -> bool:
        """Return whether the ranks are to keep the hidden states of a step; called once per plan if `needs_states`.

        While there is no credit for a run, they are not kept, which would take 3 to 5 % of a step of the demo model.
        They are kept again from a step on that starts a sequence, since the others lack their earlier ones.

        Args:
            num_rows: sequences that have rows.
            new_lens: known tokens of the sequences that it starts.
        """
        if not self._keeps_states and not new_lens:
            return False
        loads = self._loads.values()
        if num_rows > self._most_rows:
            self._keeps_states = False
        elif self._keeps_states:
            self._keeps_states = not loads or any(load.may_run_soon for load in loads)
        elif not loads or any(load.may_compute(sum(new_lens)) for load in loads):
            self._keeps_states, self._kept_since = True, step_id
        return self._keeps_states

    def is_due(self, num_rows: int, num_started: int) -> bool:
        """Return whether `choose` is to be called for the next step without prompts, of this many rows.

        Where drafts do not pay, this call is all that they cost: `choose` takes 50 us, a step of the demo model 500.

        Args:
            num_started: sequences that have got a row so far.
        """
        self._num_undecayed_steps += 1
        if self._num_unchecked_steps:
            self._num_unchecked_steps -= 1
            return False
        if not self._keeps_states or num_rows > self._most_rows:
            return False
        is_due = self._load(num_rows).is_due(num_started)
        if not is_due:
            self._num_unchecked_steps = _CHECK_INTERVAL - 1
        return is_due

    def _load(self, num_rows: int) -> DraftLoad:
        key = num_rows.bit_length()
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = DraftLoad(self._budget)
        return load

    def skip(self, num_rows: int) -> None:
        """Count a step for which `is_due` was true, and for which there is nothing to draft."""
        self._num_unchecked_steps = self._load(num_rows).on_choice(has_drafts=False)

    def choose(
        self,
        rows: RowArray,
        first_steps: npt.NDArray[np.int64],
        num_tokens: IntArray,
        limits: IntArray,
        most: int,
    ) -> IntArray | None:
        """Return the most drafted tokens of each row of a step without prompts. Returns None if none has any.

        Args:
            rows: [n], rows that decode in the step.
            first_steps: [n], first step of each row's sequence.
            num_tokens: [n], known tokens of each row.
            limits: [n], most drafted tokens that each row has room for.
            most: drafted tokens of all rows together.
        """
        load, chosen, num_pending = self._load(rows.size), None, 0
        if self._kept_since:
            limits = np.where(first_steps >= self._kept_since, limits, 0)
        if most > 0 and load.may_draft and limits.any():
            chosen = self._held_choice(rows, first_steps, limits, most)
            if chosen is None:
                has_room = limits > 0
                num_pending = self._count_pending(rows[has_room], first_steps[has_room], num_tokens[has_room])
                if load.may_compute(num_pending):
                    self._count_outcomes()
                    self._reset_changed(rows, first_steps)
                    self._decay()
                    chosen = self._best(load, rows, limits, most)
                self._hold(chosen, (rows.tobytes(), first_steps.tobytes()), can_last=load.knows_drafts)
        if chosen is not None:
            self._num_computed[rows] = num_tokens
        self._num_unchecked_steps = load.on_choice(has_drafts=chosen is not None, num_pending=num_pending)
        return chosen

    def _count_pending(self, rows: RowArray, first_steps: npt.NDArray[np.int64], num_tokens: IntArray) -> int:
        """Return the tokens that the ranks have to compute for the drafts of rows first."""
        is_same = self._sequences[rows] == first_steps
        return int(num_tokens.sum() - self._num_computed[rows[is_same]].sum())

    def _hold(self, chosen: IntArray | None, key: tuple[bytes, bytes], *, can_last: bool) -> None:
        """Keep a choice for the next steps."""
        before = self._choice if key == self._choice_key else None
        is_same = chosen is not None and before is not None and np.array_equal(chosen, before)
        lasts = is_same and can_last
        self._choice_interval = min(2 * self._choice_interval, _MAX_CHOICE_STEPS) if lasts else 1
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
        self._accepted.decay(self._num_undecayed_steps)
        self._proposed.decay(self._num_undecayed_steps)
        self._num_undecayed_steps = 0

    def _best(self, load: DraftLoad, rows: RowArray, limits: IntArray, most: int) -> IntArray | None:
        """Return the most drafted tokens of each row by the estimates. Returns None if none pays."""
        acceptance, proposed = self.acceptance(rows), self._proposed.of(rows)
        if not load.knows_drafts:
            limits = np.minimum(limits, 1)
        chosen, gain = self._fastest(load, acceptance, proposed, limits, most)
        if gain < _MIN_GAIN and load.is_trial:
            # The text may have changed for the better.
            least = int(np.count_nonzero(limits))
            limits = np.minimum(limits, _TRIAL_LEN)
            chosen, _ = self._fastest(load, (1.0 + acceptance) / 2, (1.0 + proposed) / 2, limits, most, least)
        return chosen if chosen.any() else None

    def _fastest(
        self,
        load: DraftLoad,
        acceptance: FloatArray,
        proposed: FloatArray,
        limits: IntArray,
        most: int,
        least: int = 1,
    ) -> tuple[IntArray, float]:
        """Return drafted tokens of each row, `least` to `most` of all, and their expected speed relative to none.

        Args:
            acceptance, proposed: [n], as for `acceptance`, and the probability that a row drafts.
        """
        num_rows, places = limits.size, np.arange(1, self._max_len + 1)
        odds = np.power.outer(acceptance, places) * proposed[:, None]  # [n, max_len]
        odds[places > limits[:, None]] = 0.0
        order = np.argsort(-odds, axis=None, kind="stable")[: min(most, np.count_nonzero(odds))]
        if not order.size:
            return np.zeros(num_rows, np.int32), 0.0
        owners, before = np.divmod(order, self._max_len)
        tokens = 1.0 + odds.ravel()[order].cumsum() / num_rows
        times = load.relative_times(num_rows, proposed[owners].cumsum(), np.maximum.accumulate(before + 1))
        rates = tokens / times
        first = min(least, rates.size) - 1
        best = first + int(rates[first:].argmax())
        chosen: IntArray = np.bincount(owners[: best + 1], minlength=num_rows).astype(np.int32)
        return chosen, float(rates[best])

    def observe(self, rows: RowArray, num_drafted: IntArray, num_accepted: IntArray) -> None:
        """Record the outcome of the steps that were to draft for distinct rows."""
        self._outcomes.append((rows, num_drafted, num_accepted))  # to be counted together: 20 us

    def _count_outcomes(self) -> None:
        if not self._outcomes:
            return
        rows, num_drafted, num_accepted = map(np.concatenate, zip(*self._outcomes, strict=True))
        self._outcomes.clear()
        # The first rejected token is one trial; those after it are none.
        self._accepted.add(rows, num_accepted, np.minimum(num_accepted + 1, num_drafted))
        self._proposed.add(rows, (num_drafted > 0).astype(np.int32), np.ones_like(num_drafted))

    def is_measured(self, step_id: int) -> bool:
        """Return whether `observe_plain` is to be called for a step without drafts."""
        return self._num_measured_steps > 0 or step_id % _MEASURED_INTERVAL == 0

    def observe_plain(self, num_rows: int, seconds: float) -> None:
        """Record the time of a step without prompts and drafts that `is_measured`."""
        num_steps = _MEASURED_INTERVAL
        if self._num_measured_steps:
            self._num_measured_steps -= 1
            num_steps = 1
        if num_rows <= self._most_rows:
            self._load(num_rows).observe_plain(num_rows, seconds, num_steps)
        else:
            self._budget.add_plain_steps(num_steps)

    def observe_drafted(
        self,
        num_rows: int,
        num_sampled: int,
        seconds: float,
        draft_s: float,
        num_drafted: int,
        num_rounds: int,
    ) -> None:
        """Record the time of a step without prompts whose plan let ranks draft, whether or not they did.

        Args:
            num_sampled: tokens that the rows gained.
            seconds: of the step as a whole.
            draft_s: part of it that the ranks took to draft `num_rounds` tokens per row, one after the other.
            num_drafted: tokens that they drafted for all rows.
        """
        self._num_measured_steps = _MEASURED_STEPS
        load = self._load(num_rows)
        load.observe_drafted(num_rows, num_drafted, num_rounds, num_sampled, seconds, draft_s)

    def _reset_changed(self, rows: RowArray, first_steps: npt.NDArray[np.int64]) -> None:
        """Forget the outcomes of rows that have another sequence now."""
        changed = rows[self._sequences[rows] != first_steps]
        if changed.size:
            self._accepted.forget(changed)
            self._proposed.forget(changed)
            self._sequences[rows] = first_steps
