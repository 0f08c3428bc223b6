"""JumpForward: lets the ranks draft the text that grammars force (jump-forward), without speculative decoding."""

from __future__ import annotations

import numpy as np

from ...proto.block_tables import IntArray, RowArray
from ...proto.config import MAX_JUMP_FORWARD_TOKENS
from .load_switch import LoadSwitch

# A row that has used its room within this many chances has room in each step; another one in every so many steps.
_MAX_UNUSED = 12
_PROBE_INTERVAL_STEPS = 8


class JumpForward:
    """Room for jump-forward tokens in the steps of rows with grammars.

    The ranks alone know which text is forced, after the newest token, when the next step is already planned. So a
    plan leaves room in advance, and what the ranks do not use is taken back with the result. All these tokens are
    accepted with llguidance; xgrammar allows any spelling of the text, of which the model may choose another one. A
    step with room costs more time: 0.2 ms for one row and 0.4 ms for 16 of a CPU. So the time per token of steps with
    and without room is compared.

    Args:
        num_rows: rows (batch slots).

    Attributes:
        num_rows: rows with grammars. Steps without any need no `choose`.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = 0
        self._has_grammar = np.zeros(num_rows, np.bool_)
        self._num_unused = np.zeros(num_rows, np.int32)  # chances that the row has not used since it last did
        self._loads: dict[
            int, LoadSwitch
        ] = {}  # power of two that the number of rows is below |-> measurements

    def add(self, row: int) -> None:
        """Note that a sequence with a grammar has got a row."""
        self._has_grammar[row] = True
        self._num_unused[row] = 0
        self.num_rows += 1

    def discard(self, row: int) -> None:
        """Note that a row is free."""
        self.num_rows -= bool(self._has_grammar[row])
        self._has_grammar[row] = False

    def choose(self, rows: RowArray, limits: IntArray, most: int, step_id: int) -> IntArray | None:
        """Return the most jump-forward tokens of each row of a step without prompts. Returns None if none has room.

        Args:
            rows: [n], rows that decode in the step.
            limits: [n], most drafted tokens that each row has room for.
            most: drafted tokens of all rows together.
        """
        has_room = self._has_grammar[rows] & (limits > 0)
        if step_id % _PROBE_INTERVAL_STEPS:
            has_room &= self._num_unused[rows] < _MAX_UNUSED
        num_rows = int(np.count_nonzero(has_room))
        if not 0 < num_rows <= most or not self._load(rows.size).is_on:
            return None
        lens = np.minimum(limits, min(MAX_JUMP_FORWARD_TOKENS, most // num_rows))
        chosen: IntArray = np.where(has_room, lens, 0).astype(np.int32)
        return chosen

    def observe(self, rows: RowArray, num_jump_forward: IntArray) -> None:
        """Record how many jump-forward tokens distinct rows have had, of those for which they had room."""
        self._num_unused[rows] = np.where(num_jump_forward > 0, 0, self._num_unused[rows] + 1)

    def observe_step(self, num_rows: int, num_tokens: int, seconds: float, *, has_drafts: bool) -> None:
        """Record the time of a step without prompts, and the tokens that it gave its rows.

        Args:
            has_drafts: it had room for such tokens.
        """
        if self.num_rows:
            self._load(num_rows).observe_step(num_tokens, seconds, has_drafts=has_drafts)

    def _load(self, num_rows: int) -> LoadSwitch:
        return self._loads.setdefault(num_rows.bit_length(), LoadSwitch(is_on=True))
