"""DraftSwitch: lets steps draft where that was measured to take less time per token, and not elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...proto.block_tables import IntArray
from ...proto.config import SpeculativeConfig

# Most rows of a step with drafts on a CPU. The linear layers of more rows are bound by arithmetic (8 rows of float32
# with AVX2, at 240 GFLOP/s and 57 GB/s), so a drafted token costs as much as one of another sequence.
MOST_ROWS_ON_CPU = 8
# Weight of the newest step in a mean, of 32 steps or more. The demo model accepts 0 to 6 of 6 tokens in single steps.
_WEIGHT = 1 / 32
# A step counts at most as this many times the mean: other processes delay single steps.
_MAX_RATIO = 2.0
# Steps after a switch that are not measured: caches hold the data of the other kind, so that they take up to 1.3
# times as long, and the first one with drafts computes the tokens that the drafting model has missed.
_NUM_SETTLING_STEPS = 4
# Fewest measured steps with drafts that are compared with those without.
_MIN_DRAFTED_STEPS = 8
# Steps with drafts after which some without are measured again, which costs prose 2 %. With 512, a mean from a moment
# in which the machine was slow kept drafts on that took 1.5 times as long: 10 % of the time of some quotes.
_MAX_DRAFTED_STEPS = 128
# Steps without drafts after drafts that paid, and at most. Each time that drafts do not pay makes it four times as
# many. Twelve steps with drafts in vain cost as much time as 20 without, which is 2 % of the most.
_MIN_PAUSE, _MAX_PAUSE = 16, 1024
# The first pause, after which the slow first 24 steps of an engine hardly count, and the longest one for which the
# hidden states that a draft head reads are kept. They take 3 to 5 % of a step of the demo model.
_SHORT_PAUSE = 64
# While drafts are on and there were none for a short pause or longer, one in so many steps may have some: to look for
# repeated text takes 4 to 12 us of a step of 350.
_IDLE_INTERVAL = 4
# Fewest tokens that n-grams continue. Of the drafts that continue 4 tokens, the first one is right in 0.64 to 0.79 of
# the cases (greedy text of the demo model), of those that continue one in 0.06 to 0.37.
_MIN_REPEATED = 4


@dataclass(slots=True)
class _Pace:
    """Moving averages over steps of one kind: of the tokens that all rows gained, and of the time."""

    num_steps: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens

    def add(self, num_tokens: int, seconds: float) -> None:
        if self.num_steps:
            seconds = min(seconds, _MAX_RATIO * self.seconds)
        self.num_steps += 1
        weight = max(_WEIGHT, 1 / self.num_steps)
        self.tokens += weight * (num_tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)


@dataclass(slots=True)
class _Load:
    """Steps of about equally many rows, and whether they draft.

    Attributes:
        plain, drafted: steps without drafts, and those with drafts since these were last switched on.
        num_plain, num_drafted: such steps since the last one of the other kind or the switch, measured or not.
        pause: steps without drafts in a row after which they are switched on.
    """

    is_on: bool = False
    plain: _Pace = field(default_factory=_Pace)
    drafted: _Pace = field(default_factory=_Pace)
    num_plain: int = 0
    num_drafted: int = 0
    pause: int = _SHORT_PAUSE

    def add_plain(self, num_tokens: int, seconds: float) -> None:
        self.num_plain += 1
        if self.num_plain > _NUM_SETTLING_STEPS:
            self.plain.add(num_tokens, seconds)
        if not self.is_on and self.num_plain >= self.pause:
            self.is_on, self.num_drafted, self.drafted = True, 0, _Pace()

    def add_drafted(self, num_tokens: int, seconds: float) -> None:
        self.num_plain = 0
        self.num_drafted += 1
        if not self.is_on or self.num_drafted <= _NUM_SETTLING_STEPS:
            return
        self.drafted.add(num_tokens, seconds)
        if self.drafted.num_steps < _MIN_DRAFTED_STEPS:
            return
        if self.drafted.seconds_per_token > self.plain.seconds_per_token:
            self.is_on, self.pause = False, min(4 * self.pause, _MAX_PAUSE)
        elif self.num_drafted >= _MAX_DRAFTED_STEPS:
            self.is_on, self.pause = False, _MIN_PAUSE


class DraftSwitch:
    """Lets the rows of a step draft as many tokens as they may, or none.

    Args:
        max_len: most drafted tokens per row and step.
        most_rows: steps of more rows have no drafts; None for no limit.
        needs_states: drafts of a row need the hidden states of all of its steps; see `keeps_states`.
    """

    def __init__(self, max_len: int, most_rows: int | None = None, *, needs_states: bool = False) -> None:
        self._max_len, self._most_rows = max_len, most_rows
        self._loads: dict[int, _Load] = {}  # power of two that the number of rows is below |-> its steps
        self._needs_states, self._keeps_states = needs_states, True
        self._kept_since = 0  # step from which on hidden states are kept

    def _load(self, num_rows: int) -> _Load | None:
        """Return the steps of a load. Returns None if it never has drafts."""
        if self._most_rows is not None and num_rows > self._most_rows:
            return None
        return self._loads.setdefault(num_rows.bit_length(), _Load())

    def is_on(self, num_rows: int) -> bool:
        """Return whether the next step, of so many rows that decode and no prompts, is to draft."""
        load = self._load(num_rows)
        if load is None or not load.is_on or not self._keeps_states:
            return False
        return load.num_plain < _SHORT_PAUSE or load.num_plain % _IDLE_INTERVAL == 0

    def choose(self, first_steps: npt.NDArray[np.int64], limits: IntArray, most: int) -> IntArray | None:
        """Return the most drafted tokens of each row of a step. Returns None if none has any.

        Args:
            first_steps: [n], first step of each row's sequence.
            limits: [n], most drafted tokens that each row has room for.
            most: drafted tokens of all rows together.
        """
        lens = np.where(first_steps >= self._kept_since, limits, 0).clip(0, self._max_len)
        num_rows = int(np.count_nonzero(lens))
        if not 0 < num_rows <= most:
            return None
        chosen: IntArray = lens.clip(0, most // num_rows).astype(np.int32)
        return chosen

    def keeps_states(self, step_id: int, num_rows: int, *, starts_sequence: bool) -> bool:
        """Return whether the ranks are to keep the hidden states of a step; called once per plan.

        In a long pause they are not kept. They are kept again from a step on that starts a sequence, since the others
        lack their earlier ones.

        Args:
            num_rows: sequences that have rows.
        """
        if self._needs_states:
            load = self._load(num_rows)
            if load is None or not (load.is_on or load.pause <= _SHORT_PAUSE):
                self._keeps_states = False
            elif not self._keeps_states and starts_sequence:
                self._keeps_states, self._kept_since = True, step_id
        return self._keeps_states

    def observe_step(self, num_rows: int, num_tokens: int, seconds: float, *, has_drafts: bool) -> None:
        """Record the time of a step without prompts, and the tokens that its rows gained."""
        load = self._load(num_rows)
        if load is not None:
            (load.add_drafted if has_drafts else load.add_plain)(num_tokens, seconds)


def min_repeated_len(config: SpeculativeConfig) -> int:
    """Return how many of a sequence's newest tokens must occur earlier before it drafts; 0 for drafts of models."""
    return max(_MIN_REPEATED, config.prompt_lookup_min) if config.method == "ngram" else 0


def ends_repeated(text: bytes, min_len: int) -> bool:
    """Return whether the last `min_len` tokens of a text occur in it earlier as well.

    The search runs from the end: 1,000 tokens take 1 us, 100,000 take 40 to 600 us. A match of bytes that begins
    within a token counts too; it costs a step that drafts nothing.

    Args:
        text: token ids, int32.
    """
    width = np.dtype(np.int32).itemsize
    return text.rfind(text[-width * min_len :], 0, len(text) - width) >= 0
