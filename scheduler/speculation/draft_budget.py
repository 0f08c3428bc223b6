"""DraftBudget: bounds the time that steps lose to drafts, as conservative bandits bound the cost of exploration."""

from __future__ import annotations

# Part of the time of steps without drafts that drafts may cost. It is more after they paid, when they are to be tried
# again soon, and then halves each time that the credit is spent.
_SHARE, _MOST_SHARE = 0.01, 0.05
# Credit at first, at most, and at which drafts are tried again after it was spent or where the estimates speak
# against them, in steps without drafts.
_START, _MOST, _STAKE = 3.0, 16.0, 3.0


class DraftBudget:
    """Time that drafts have saved and may cost, in steps without drafts (Wu et al., Conservative Bandits, 2016).

    Each step without drafts adds a small part of itself, and each step with drafts what it saved: the steps without
    drafts that would have given its tokens, less its own time. Drafts end when nothing is left, and are tried again
    when there is enough. So they cost no more than this part and the first credit, whatever the estimates say. The
    credit has an upper bound, so that drafts that cease to pay end soon (Page's test for a change of the mean, 1954).
    """

    def __init__(self) -> None:
        self._credit, self._share = _START, _SHARE
        self._debt = 0.0  # of the present run of steps with drafts
        self.is_spent = False  # the next steps are not to draft

    @property
    def allows_probe(self) -> bool:
        """Return whether steps may draft against the estimates, to measure again."""
        return self._credit >= _STAKE

    def add_plain_step(self) -> None:
        """Count a step without drafts."""
        if self._credit < _STAKE:
            self._credit += self._share
            self.is_spent &= self._credit < _STAKE

    def add_drafted_step(self, num_saved: float) -> None:
        """Count a step with drafts, and the steps without drafts that it saved; negative if it cost more."""
        if num_saved > 0:
            paid = min(num_saved, self._debt)
            self._debt -= paid
            num_saved -= paid
        self._credit += num_saved
        if self._credit >= _MOST:
            self._credit, self._share = _MOST, _MOST_SHARE
        if self._credit <= 0.0 and not self.is_spent:
            self.is_spent = True
            self._share = max(self._share / 2, _SHARE)
            self.end_run()

    def add_catch_up(self, num_steps: float) -> None:
        """Count what the first step of a run computed of the steps before, in steps without drafts.

        The run itself may still pay, and what it saves is taken for this first. The rest counts at its end.
        """
        self._debt += num_steps

    def end_run(self) -> None:
        """Settle what the run of steps with drafts has not saved."""
        self._credit -= self._debt
        self._debt = 0.0
