"""RefusalScope: the further requests that a scheduler would refuse as it has just refused one."""

from __future__ import annotations

from dataclasses import dataclass

# Longest time for which a scope holds. It bounds how long a gateway refuses requests for which there is room that it
# cannot see, for example because a sequence of another gateway has ended. No refusal names a shorter delay before a
# retry.
MAX_HOLD_S = 0.1


@dataclass(frozen=True, slots=True)
class RefusalScope:
    """Requests of the refused one's tenant and priority, or a lower one, of any size.

    Attributes:
        hold_s: time for which all of them would be refused, unless a sequence of the replica ends before.
        max_timeout_s: their longest deadline; None for all requests, without a deadline as well.
    """

    hold_s: float
    max_timeout_s: float | None = None

    def has(self, timeout_s: float | None) -> bool:
        """Return whether a request with this deadline is one of them."""
        return self.max_timeout_s is None or (timeout_s is not None and timeout_s <= self.max_timeout_s)
