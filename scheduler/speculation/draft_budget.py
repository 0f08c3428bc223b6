"""DraftBudget: bounds the time that steps lose to drafts, as conservative bandits bound the cost of exploration."""

from __future__ import annotations

# Part of the time of steps without drafts that drafts may cost.
_SHARE = 0.0075
# Credit at first and at most, in steps without drafts.
_START, _MOST = 4.0, 16.0


class DraftBudget:
    """Time that drafts have saved and may cost, in steps without drafts (Wu et al., Conservative Bandits, 2016).

    Each step without drafts adds a small part of itself, and each run of steps with drafts what it saved or lost. A
    run begins when there is credit for what it may lose, so drafts cost no more than this part and the first credit,
    whatever the estimates say. The first drafts of an engine, whose memory is cold, are not charged.
    """

    def __init__(self) -> None:
        self._credit = _START

    def allows(self, num_steps: float) -> bool:
        """Return whether a run may lose so many steps without drafts."""
        return self._credit >= num_steps

    def add_plain_steps(self, count: int) -> None:
        """Count steps without drafts."""
        self.add(_SHARE * count)

    def add(self, num_saved: float) -> None:
        """Count what drafts saved, in steps without drafts; negative if they cost more."""
        self._credit = min(self._credit + num_saved, _MOST)
