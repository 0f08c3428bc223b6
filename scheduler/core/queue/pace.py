"""Pace: how long steps take and how long outputs become, learned from the latest ones."""

from __future__ import annotations

# Weight of the latest step, so that a replica that becomes slow is noticed within 20 steps.
_LATEST_SHARE = 0.05
# A step that took this many times the mean was interrupted, and teaches no more than if it took that long.
_MAX_SURPRISE = 4.0
# Growth of `least_step_s` per step, so that it follows a model whose steps become longer: twofold in 7,000 steps. An
# overload, in which no step is short, ends before that.
_LEAST_GROWTH = 1.0001
# Weight of earlier outputs at the end of one, so that about the latest 256 count.
_KEPT_SHARE = 1.0 - 1.0 / 256


class Pace:
    """Means of one replica, recent steps and outputs first.

    Attributes:
        step_s: mean seconds of a step; 0 before the first.
        least_step_s: seconds of the shortest of the recent steps; 0 before the first.
    """

    def __init__(self) -> None:
        self.step_s = self.least_step_s = 0.0
        self._num_steps = self._num_launched = 0
        self._num_tokens = self._num_stops = 0.0

    def observe_step(self, seconds: float, is_done: bool = True) -> None:
        """Record that a step took `seconds`.

        Args:
            is_done: the rank has waited for the step; otherwise its time is part of the next step that is done
                (see `CostModel.observe`).
        """
        self._num_launched += 1
        if not is_done or seconds <= 0:  # its end and the one before came together
            return
        seconds, self._num_launched = seconds / self._num_launched, 0
        self._num_steps += 1
        if self._num_steps == 1:
            self.step_s = self.least_step_s = seconds
            return
        seconds = min(seconds, _MAX_SURPRISE * self.step_s)
        self.step_s += max(_LATEST_SHARE, 1 / self._num_steps) * (seconds - self.step_s)
        self.least_step_s = min(seconds, self.least_step_s * _LEAST_GROWTH)

    def observe_output(self, num_tokens: int, has_stopped: bool) -> None:
        """Record the end of an output.

        Args:
            has_stopped: it ended by a stop token or a stop string, not by its limit.
        """
        self._num_tokens = _KEPT_SHARE * self._num_tokens + num_tokens
        self._num_stops = _KEPT_SHARE * self._num_stops + has_stopped

    def expect_tokens(self, most: int, *, may_stop: bool) -> float:
        """Return the expected number of further tokens of an output of at most `most`.

        Tokens per stop are the mean of an exponential distribution, of which outputs that ended by their limits are
        censored observations. Then it does not matter how many tokens an output has already.

        Args:
            may_stop: something else than its limit may end it. Then 0 is expected before the first output ended.
        """
        if not may_stop or (self._num_tokens and not self._num_stops):
            return float(most)
        return min(float(most), self._num_tokens / (self._num_stops or 1.0))
