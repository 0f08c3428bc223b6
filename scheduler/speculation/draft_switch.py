"""DraftSwitch: lets steps draft where that was measured to take less time per token, and not elsewhere."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...proto.block_tables import IntArray
from ...proto.config import SpeculativeConfig
from .load_switch import FIRST_PAUSE, LoadSwitch

# Most rows of a step with drafts on a CPU. The linear layers of more rows are bound by arithmetic (8 rows of float32
# with AVX2, at 240 GFLOP/s and 57 GB/s), so a drafted token costs as much as one of another sequence.
MOST_ROWS_ON_CPU = 8
# The longest pause for which the hidden states that a draft head reads are kept. They take 3 to 5 % of a step of the
# demo model.
_SHORT_PAUSE = FIRST_PAUSE
# While drafts are on and there were none for a short pause or longer, one in so many steps may have some: to look for
# repeated text takes 4 to 12 us of a step of 350.
_IDLE_INTERVAL = 4
# Fewest tokens that n-grams continue. Of the drafts that continue 4 tokens, the first one is right in 0.64 to 0.79 of
# the cases (greedy text of the demo model), of those that continue one in 0.06 to 0.37.
_MIN_REPEATED = 4


class DraftSwitch:
    """Lets the rows of a step draft as many tokens as they may, or none.

    Args:
        max_len: most drafted tokens per row and step.
        most_rows: steps of more rows have no drafts; None for no limit.
        needs_states: drafts of a row need the hidden states of all of its steps; see `keeps_states`.
    """

    def __init__(self, max_len: int, most_rows: int | None = None, *, needs_states: bool = False) -> None:
        self._max_len, self._most_rows = max_len, most_rows
        self._loads: dict[int, LoadSwitch] = {}  # power of two that the number of rows is below |-> its steps
        self._needs_states, self._keeps_states = needs_states, True
        self._kept_since = 0  # step from which on hidden states are kept

    def _load(self, num_rows: int) -> LoadSwitch | None:
        """Return the steps of a load. Returns None if it never has drafts."""
        if self._most_rows is not None and num_rows > self._most_rows:
            return None
        return self._loads.setdefault(num_rows.bit_length(), LoadSwitch())

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
            load.observe_step(num_tokens, seconds, has_drafts=has_drafts)


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
