"""DraftTrials: lets steps draft while their time per token is shorter than that of steps without drafts."""

from __future__ import annotations

from dataclasses import dataclass, field

# Factor of the weight of all earlier steps of a kind per step: half after 138 steps.
_DECAY = 0.995
# A step counts at most as this many times a typical one of its kind: other processes delay single steps.
_MAX_RATIO = 2.0
# Factor by which the typical time moves towards each step's: it follows the median.
_MOVE = 1.05
# Steps of a trial: those that draft vary more. Steps between trials double while trials change nothing.
_DRAFTING_STEPS, _PLAIN_STEPS = 8, 3
_MIN_INTERVAL, _MAX_INTERVAL = 16, 128
# Drafts must shorten the time per token to this share to be switched on, and to this one to stay on.
_SWITCH_ON, _STAY_ON = 0.96, 1.01


@dataclass(slots=True)
class _Rate:
    """Weighted sums over the steps of a kind."""

    typical_s: float = 0.0  # time of a step
    num_steps: float = 0.0
    num_tokens: float = 0.0
    seconds: float = 0.0

    @property
    def seconds_per_token(self) -> float | None:
        return self.seconds / self.num_tokens if self.num_steps >= 1.0 else None

    def add(self, num_tokens: int, seconds: float) -> None:
        self.typical_s = self.typical_s or seconds
        self.typical_s *= _MOVE if seconds > self.typical_s else 1 / _MOVE
        seconds = min(seconds, _MAX_RATIO * self.typical_s)
        self.num_steps = _DECAY * self.num_steps + 1.0
        self.num_tokens = _DECAY * self.num_tokens + num_tokens
        self.seconds = _DECAY * self.seconds + seconds


@dataclass(slots=True)
class _Load:
    """The choice for steps of about as many rows.

    Attributes:
        is_on: steps draft, except in trials.
        is_trial: the present steps are of the kind that was not chosen.
        num_left: steps until the next trial, or of the present one.
    """

    drafting: _Rate = field(default_factory=_Rate)
    plain: _Rate = field(default_factory=_Rate)
    is_on: bool = True
    is_trial: bool = False
    num_left: int = _MIN_INTERVAL
    interval: int = _MIN_INTERVAL

    def next(self) -> bool:
        """Return whether the next step may draft."""
        if self.num_left == 0:
            self.is_trial = not self.is_trial
            if not self.is_trial:
                self._decide()
            trial_len = _PLAIN_STEPS if self.is_on else _DRAFTING_STEPS
            self.num_left = trial_len if self.is_trial else self.interval
        self.num_left -= 1
        return self.is_on != self.is_trial

    def _decide(self) -> None:
        drafting, plain = self.drafting.seconds_per_token, self.plain.seconds_per_token
        if drafting is None or plain is None:
            return
        is_on = drafting < (_STAY_ON if self.is_on else _SWITCH_ON) * plain
        self.interval = min(2 * self.interval, _MAX_INTERVAL) if is_on == self.is_on else _MIN_INTERVAL
        self.is_on = is_on


class DraftTrials:
    """Measures both kinds of steps, whatever makes up their time: drafting, verification, planning and results.

    Loads are told apart by the number of rows, to a factor of two.
    """

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}

    def allow(self, num_rows: int) -> bool:
        """Return whether the next step of this many rows may draft; called once per step."""
        return self._load(num_rows).next()

    def observe(self, num_rows: int, has_drafts: bool, num_tokens: int, seconds: float) -> None:
        """Record a step without prompts.

        Args:
            has_drafts: the plan let ranks draft, whether or not they did.
            num_tokens: tokens that the rows gained.
        """
        load = self._load(num_rows)
        (load.drafting if has_drafts else load.plain).add(num_tokens, seconds)

    def _load(self, num_rows: int) -> _Load:
        return self._loads.setdefault(num_rows.bit_length(), _Load())
