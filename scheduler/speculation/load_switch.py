"""LoadSwitch: lets steps have drafted tokens where that was measured to take less time per token, not elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field

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
# The first pause, after which the slow first 24 steps of an engine hardly count.
FIRST_PAUSE = 64


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
class LoadSwitch:
    """Steps of about equally many rows, and whether they draft.

    Steps with drafts and without are compared in turns. Some loads begin with drafts; then those without are measured
    after the first of these.

    Attributes:
        is_on: steps may have drafts.
        plain, drafted: steps without drafts, and those with drafts since these were last switched on.
        num_plain, num_drafted: such steps since the last one of the other kind or the switch, measured or not.
        pause: steps without drafts in a row after which they are switched on.
    """

    is_on: bool = False
    plain: _Pace = field(default_factory=_Pace)
    drafted: _Pace = field(default_factory=_Pace)
    num_plain: int = 0
    num_drafted: int = 0
    pause: int = FIRST_PAUSE

    def observe_step(self, num_tokens: int, seconds: float, *, has_drafts: bool) -> None:
        """Record the time of a step, and the tokens that its rows gained."""
        (self._add_drafted if has_drafts else self._add_plain)(num_tokens, seconds)

    def _add_plain(self, num_tokens: int, seconds: float) -> None:
        self.num_plain += 1
        if self.num_plain > _NUM_SETTLING_STEPS:
            self.plain.add(num_tokens, seconds)
        if not self.is_on and self.num_plain >= self.pause:
            self.is_on, self.num_drafted, self.drafted = True, 0, _Pace()

    def _add_drafted(self, num_tokens: int, seconds: float) -> None:
        self.num_plain = 0
        self.num_drafted += 1
        if not self.is_on or self.num_drafted <= _NUM_SETTLING_STEPS:
            return
        self.drafted.add(num_tokens, seconds)
        if self.drafted.num_steps < _MIN_DRAFTED_STEPS:
            return
        if not self.plain.num_steps:
            self.is_on, self.pause = False, _MIN_PAUSE
        elif self.drafted.seconds_per_token > self.plain.seconds_per_token:
            self.is_on, self.pause = False, min(4 * self.pause, _MAX_PAUSE)
        elif self.num_drafted >= _MAX_DRAFTED_STEPS:
            self.is_on, self.pause = False, _MIN_PAUSE
