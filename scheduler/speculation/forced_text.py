"""ForcedText: lets the ranks draft the text that grammars force (jump-forward), without speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...proto.block_tables import IntArray, RowArray
from ...proto.config import MAX_FORCED_TOKENS

# A row that has used its room within this many chances has room in each step; another one in every so many steps.
_MAX_UNUSED = 12
_PROBE_INTERVAL_STEPS = 8
# One step in so many has no room, to measure how long such a step takes; the first ones soon.
PLAIN_INTERVAL_STEPS, _FIRST_PLAIN_INTERVAL_STEPS = 16, 4
# Steps of a kind that must be measured before the two are compared.
_MIN_STEPS = 4.0
# Factor of the weight of earlier steps per step: half after 34 steps.
_DECAY = 0.98
# A step counts at most as this many times the mean of its kind: other processes delay single steps.
_MAX_RATIO = 2.0
# Steps without room after room has not paid; twice as many each time that it does not pay again.
_MIN_PAUSE_STEPS, _MAX_PAUSE_STEPS = 64, 1024


@dataclass(slots=True)
class _Pace:
    """Weighted sums over the steps of a kind."""

    num_steps: float = 0.0
    num_tokens: float = 0.0
    seconds: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.num_steps >= _MIN_STEPS and self.num_tokens > 0

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.num_tokens

    def add(self, num_tokens: int, seconds: float) -> None:
        if self.is_known:
            seconds = min(seconds, _MAX_RATIO * self.seconds / self.num_steps)
        self.num_steps = _DECAY * self.num_steps + 1.0
        self.num_tokens = _DECAY * self.num_tokens + num_tokens
        self.seconds = _DECAY * self.seconds + seconds


@dataclass(slots=True)
class _Load:
    """Whether room for forced text pays, in steps of about equally many rows.

    Attributes:
        plain, roomy: steps without and with room.
        num_pause_steps, pause_interval: steps without room that are left, and of the whole pause.
        num_roomy_steps: since the last step without room.
    """

    plain: _Pace = field(default_factory=_Pace)
    roomy: _Pace = field(default_factory=_Pace)
    num_pause_steps: int = 0
    pause_interval: int = 0
    num_roomy_steps: int = 0

    def may_have_room(self) -> bool:
        """Return whether the next step may have room."""
        if self.num_pause_steps:
            self.num_pause_steps -= 1
            return False
        if self.plain.is_known and self.roomy.is_known:
            if self.roomy.seconds_per_token > self.plain.seconds_per_token:
                self.pause_interval = min(max(_MIN_PAUSE_STEPS, 2 * self.pause_interval), _MAX_PAUSE_STEPS)
                self.num_pause_steps, self.roomy = self.pause_interval, _Pace()
                return False
            self.pause_interval = 0
        interval = PLAIN_INTERVAL_STEPS if self.plain.is_known else _FIRST_PLAIN_INTERVAL_STEPS
        self.num_roomy_steps = (self.num_roomy_steps + 1) % interval
        return self.num_roomy_steps > 0


class ForcedText:
    """Room for forced tokens in the steps of rows with grammars.

    The ranks alone know which text is forced, after the newest token, when the next step is already planned. So a
    plan leaves room in advance, and what the ranks do not use is taken back with the result. All forced tokens are
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
        self._loads: dict[int, _Load] = {}  # power of two that the number of rows is below |-> measurements

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
        """Return the most forced tokens of each row of a step without prompts. Returns None if none has room.

        Args:
            rows: [n], rows that decode in the step.
            limits: [n], most drafted tokens that each row has room for.
            most: drafted tokens of all rows together.
        """
        has_room = self._has_grammar[rows] & (limits > 0)
        if step_id % _PROBE_INTERVAL_STEPS:
            has_room &= self._num_unused[rows] < _MAX_UNUSED
        num_rows = int(np.count_nonzero(has_room))
        if not 0 < num_rows <= most or not self._load(rows.size).may_have_room():
            return None
        lens = np.minimum(limits, min(MAX_FORCED_TOKENS, most // num_rows))
        chosen: IntArray = np.where(has_room, lens, 0).astype(np.int32)
        return chosen

    def observe(self, rows: RowArray, num_forced: IntArray) -> None:
        """Record how many forced tokens distinct rows have had, of those for which they had room."""
        self._num_unused[rows] = np.where(num_forced > 0, 0, self._num_unused[rows] + 1)

    def observe_step(self, num_rows: int, num_tokens: int, seconds: float, *, has_drafts: bool) -> None:
        """Record the time of a step without prompts, and the tokens that it gave its rows.

        Args:
            has_drafts: it had room for forced text.
        """
        if self.num_rows:
            load = self._load(num_rows)
            (load.roomy if has_drafts else load.plain).add(num_tokens, seconds)

    def _load(self, num_rows: int) -> _Load:
        return self._loads.setdefault(num_rows.bit_length(), _Load())
