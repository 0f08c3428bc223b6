"""StepCosts: the mean time of a step by its tokens, learned from the steps so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

# The weight of a step halves after this many steps.
_HALF_LIFE_STEPS = 256
_DECAY = 0.5 ** (1 / _HALF_LIFE_STEPS)
# Weight of the latest step in `mean_prompt_tokens` and in the correction.
_LATEST_SHARE = 0.05
# Strength of the assumption that all costs are equal to 0 if the steps do not show them, in steps.
_RIDGE = 1e-3
# The normal equations are solved again after this many steps, as it takes 20 us; a step is added in 3 us.
_SOLVE_STEPS = 16
# A step that took this many times the prediction was interrupted, and teaches no more than if it took that long.
_MAX_SURPRISE = 4.0
# Growth of `least_s` per step, so that it follows a model whose steps become longer.
_LEAST_GROWTH = 1.001


@dataclass(slots=True)
class StepCosts:
    """Least squares of seconds = fixed + per_row * decoding rows + per_token * prompt tokens, recent steps first.

    The sums of the normal equations decay. A correction follows the recent ratio of measured to predicted times, so
    that a replica that becomes slow is noticed within 20 steps.

    Args:
        max_rows: rows of a replica; scales the decoding rows to 0 to 1.
        max_tokens: token budget of a step; scales the prompt tokens to 0 to 1.

    Attributes:
        mean_prompt_tokens: prompt tokens per step, recent steps first.
        mean_s: seconds per step, recent steps first; 0 before the first.
        least_s: seconds of the shortest of the recent steps; 0 before the first.
    """

    max_rows: int
    max_tokens: int
    mean_prompt_tokens: float = 0.0
    mean_s: float = 0.0
    least_s: float = 0.0
    _num_steps: int = 0
    _correction: float = 1.0
    # Sums of weight, rows, tokens, rows^2, rows * tokens, tokens^2, and of the seconds times 1, rows and tokens.
    _sums: list[float] = field(default_factory=lambda: [0.0] * 9)
    _costs: tuple[float, float, float] | None = None
    _pending: tuple[float, float, float] = (0.0, 0.0, 0.0)  # steps, rows and tokens that were only launched

    @property
    def has_measured(self) -> bool:
        """Return whether a step was observed."""
        return self._num_steps > 0

    def observe(self, num_rows: int, num_prompt_tokens: int, seconds: float, is_done: bool = True) -> None:
        """Record that a step took `seconds`.

        Args:
            num_rows: rows that decoded.
            is_done: the rank has waited for the step; otherwise its time is part of the next step that is done
                (see `CostModel.observe`).
        """
        steps, rows, tokens = self._pending
        steps, rows, tokens = (
            steps + 1,
            rows + num_rows / self.max_rows,
            tokens + num_prompt_tokens / self.max_tokens,
        )
        self.mean_prompt_tokens += _LATEST_SHARE * (num_prompt_tokens - self.mean_prompt_tokens)
        if not is_done:
            self._pending = steps, rows, tokens
            return
        self._pending = 0.0, 0.0, 0.0
        expected_s = self._dot(steps, rows, tokens)
        if expected_s > 0:
            seconds = min(seconds, _MAX_SURPRISE * expected_s * self._correction)
            self._correction += _LATEST_SHARE * (seconds / expected_s - self._correction)
        self._add(steps, rows, tokens, seconds)

    def predict_s(self, num_rows: float, num_prompt_tokens: float = 0.0) -> float:
        """Return the seconds of a step; 0 before the first was measured."""
        return self._correction * self._dot(
            1.0, num_rows / self.max_rows, num_prompt_tokens / self.max_tokens
        )

    def _add(self, steps: float, rows: float, tokens: float, seconds: float) -> None:
        terms = (
            steps * steps, steps * rows, steps * tokens, rows * rows, rows * tokens, tokens * tokens,
            steps * seconds, rows * seconds, tokens * seconds,
        )  # fmt: skip
        self._sums = [_DECAY * total + term for total, term in zip(self._sums, terms, strict=True)]
        share = max(_LATEST_SHARE, 1 / (self._num_steps + 1))
        step_s = seconds / steps
        self.mean_s += share * (step_s - self.mean_s)
        self.least_s = min(step_s, self.least_s * _LEAST_GROWTH) if self._num_steps else step_s
        self._num_steps += 1
        if self._num_steps < _SOLVE_STEPS or self._num_steps % _SOLVE_STEPS == 0:
            self._costs = None

    def _dot(self, steps: float, rows: float, tokens: float) -> float:
        if not self._num_steps:
            return 0.0
        if self._costs is None:
            self._costs = _solve(self._sums)
        fixed, per_row, per_token = self._costs
        return fixed * steps + per_row * rows + per_token * tokens


def _solve(sums: list[float]) -> tuple[float, float, float]:
    """Return the least-squares costs, none of them negative.

    While one is negative, the most negative one is set to 0 and the others are solved again.
    """
    weight, rows, tokens, rows_2, rows_tokens, tokens_2, *right = sums
    normal = np.array([[weight, rows, tokens], [rows, rows_2, rows_tokens], [tokens, rows_tokens, tokens_2]])
    normal[np.diag_indices(3)] += _RIDGE
    costs, free = np.zeros(3), [0, 1, 2]
    while free:
        solved = np.linalg.solve(normal[np.ix_(free, free)], np.array(right)[free])
        if solved.min() >= 0:
            costs[free] = solved
            break
        del free[int(solved.argmin())]
    fixed, per_row, per_token = costs.tolist()
    return fixed, per_row, per_token
