"""DraftTrials: lets steps draft while their time per token is shorter than that of steps without drafts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Factor of the weight of all earlier steps of a kind per step: half after 138 steps.
_DECAY = 0.995
# A step counts at most as this many times a typical one of its kind: other processes delay single steps.
_MAX_RATIO = 2.0
# Factor by which the typical time moves towards each step's: it follows the median.
_MOVE = 1.05
# Assumed standard deviation of a step's time beside the measured one, as a share of it: few steps agree by chance.
_LEAST_DEVIATION = 0.1
# Steps of a trial of each kind, at most. It ends as soon as the difference is clear: a trial is long only if the two
# kinds of steps are about as fast, and costs little then.
_DRAFTING_STEPS, _PLAIN_STEPS, _SHORTEST_TRIAL = 8, 12, 4
# Factor of the weight of earlier steps of a kind when a trial of it begins: the text or the machine may have changed.
_FADE = 0.5
# Steps between trials: they double while trials change nothing.
_MIN_INTERVAL, _MAX_INTERVAL = 16, 256
# Drafts must shorten the time per token to this share to be switched on, and to this one to stay on.
_SWITCH_ON, _STAY_ON = 0.96, 1.01
# Standard errors by which the two times per token must differ as well, to switch and to end a trial early. In
# simulations of 1,500 noisy steps, in which drafts make a sequence 1.16 times as fast, steps switched 0.15 instead of
# 0.65 times. Where drafts double the time per token, early ends raise the speed from 0.86 to 0.96 of that without.
_ERRORS_TO_SWITCH, _ERRORS_TO_END = 1.5, 2.0


@dataclass(slots=True)
class _Rate:
    """Weighted sums over the steps of a kind, of n tokens in s seconds each."""

    typical_s: float = 0.0  # time of a step
    num_steps: float = 0.0
    num_tokens: float = 0.0
    seconds: float = 0.0
    squared_tokens: float = 0.0
    squared_seconds: float = 0.0
    products: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.num_steps >= 1.0

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.num_tokens

    @property
    def variance(self) -> float:
        """Variance of seconds_per_token: that of a ratio of two means, from the steps' residuals s - ratio * n."""
        ratio = self.seconds_per_token
        residuals = self.squared_seconds - 2 * ratio * self.products + ratio**2 * self.squared_tokens
        return max(0.0, residuals) / self.num_tokens**2 + (_LEAST_DEVIATION * ratio) ** 2 / self.num_steps

    def fade(self, factor: float) -> None:
        """Let all steps so far count less; the ratio stays, with more variance."""
        self.num_steps *= factor
        self.num_tokens *= factor
        self.seconds *= factor
        self.squared_tokens *= factor
        self.squared_seconds *= factor
        self.products *= factor

    def add(self, num_tokens: int, seconds: float) -> None:
        self.typical_s = self.typical_s or seconds
        self.typical_s *= _MOVE if seconds > self.typical_s else 1 / _MOVE
        seconds = min(seconds, _MAX_RATIO * self.typical_s)
        self.fade(_DECAY)
        self.num_steps += 1.0
        self.num_tokens += num_tokens
        self.seconds += seconds
        self.squared_tokens += num_tokens**2
        self.squared_seconds += seconds**2
        self.products += num_tokens * seconds


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
        if self.num_left == 0 or self._ends_early:
            self.is_trial = not self.is_trial
            if self.is_trial:
                (self.plain if self.is_on else self.drafting).fade(_FADE)
            else:
                self._decide()
            trial_len = _PLAIN_STEPS if self.is_on else _DRAFTING_STEPS
            self.num_left = trial_len if self.is_trial else self.interval
        self.num_left -= 1
        return self.is_on != self.is_trial

    @property
    def _ends_early(self) -> bool:
        if not self.is_trial:
            return False
        num_most = _PLAIN_STEPS if self.is_on else _DRAFTING_STEPS
        if self.num_left > num_most - _SHORTEST_TRIAL or not self._is_known:
            return False
        return abs(self._loss) > _ERRORS_TO_END * self._error

    @property
    def _is_known(self) -> bool:
        return self.drafting.is_known and self.plain.is_known

    @property
    def _loss(self) -> float:
        """Seconds per token by which steps that draft are slower."""
        return self.drafting.seconds_per_token - self.plain.seconds_per_token

    @property
    def _error(self) -> float:
        """Standard error of `_loss`."""
        return math.sqrt(self.drafting.variance + self.plain.variance)

    def _decide(self) -> None:
        if not self._is_known:
            return
        limit = ((_STAY_ON if self.is_on else _SWITCH_ON) - 1.0) * self.plain.seconds_per_token
        doubt = _ERRORS_TO_SWITCH * self._error
        is_on = self._loss < limit + doubt if self.is_on else self._loss < min(limit, -doubt)
        if is_on != self.is_on or (is_on and -self._loss < doubt):
            self.interval = _MIN_INTERVAL
        else:
            self.interval = min(2 * self.interval, _MAX_INTERVAL)
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
