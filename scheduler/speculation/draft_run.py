"""DraftRun: successive steps with drafts, and the time that they save."""

from __future__ import annotations

from dataclasses import dataclass

# What a run may lose from its best moment on, at first, and after it has saved more than the difference.
STAKE, _MOST_STAKE = 2.0, 6.0
# The first steps of a run draft as if its text were better than the text before.
_TRIAL_STEPS = 4
# Most that a step counts as losing, and that the tokens of a pause cost: other processes delay single steps, and
# kernels may be compiled in the first one.
_MOST_LOST, MOST_CAUGHT_UP = 2.0, 8.0


@dataclass(slots=True)
class DraftRun:
    """A run of steps with drafts, maybe with some without. Times are in steps without drafts.

    A run has lost when it has lost its stake since its best moment (Page's test for a change of the mean, 1954).

    Attributes:
        num_pending: tokens that its first step computes for the drafts, of earlier steps and prompts.
        num_steps: planned with drafts.
        saved: time that it has saved; negative if it has lost some.
        stake: what it may still lose.
        caught_up: time that the pending tokens took.
    """

    num_pending: int
    num_steps: int = 0
    saved: float = 0.0
    stake: float = STAKE
    caught_up: float = 0.0

    @property
    def is_trial(self) -> bool:
        """Return whether the next step is one of the first."""
        return self.num_steps < _TRIAL_STEPS

    @property
    def is_warm(self) -> bool:
        """Return whether caches hold the code and the data of drafts."""
        return self.num_steps > _TRIAL_STEPS

    @property
    def balance(self) -> float:
        return self.saved - self.caught_up

    @property
    def has_lost(self) -> bool:
        return self.stake <= 0.0

    @property
    def has_gained(self) -> bool:
        return self.stake > STAKE

    def add(self, saved: float, usually_saved: float) -> None:
        """Add a step.

        Args:
            usually_saved: what it would have saved with warm caches, by which the run is judged.
        """
        self.saved += bounded(saved)
        self.stake = min(self.stake + bounded(usually_saved), _MOST_STAKE)

    def add_caught_up(self, spent: float) -> None:
        """Charge the run for its pending tokens."""
        self.caught_up = min(self.caught_up + spent, MOST_CAUGHT_UP)


def bounded(saved: float) -> float:
    """Return what a step has saved, or as much of its loss as counts."""
    return max(saved, -_MOST_LOST)
