"""Backoff: exponential delays between attempts. Pure: the caller passes the time."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Backoff:
    """Delays of `first_s`, twice that, four times that, and so on up to `max_s`.

    Attributes:
        num_failures: consecutive failures.
    """

    first_s: float
    max_s: float
    num_failures: int = field(default=0, init=False)
    _delay_s: float = field(default=0.0, init=False)
    _next_attempt: float = field(default=0.0, init=False)

    def fail(self, now: float) -> float:
        """Record a failed attempt; return the delay before the next attempt, in seconds."""
        # Doubled from the last delay: 2.0 ** num_failures overflows after 1024 failures.
        self._delay_s = min(2 * self._delay_s, self.max_s) if self.num_failures else self.first_s
        self.num_failures += 1
        self._next_attempt = now + self._delay_s
        return self._delay_s

    def is_due(self, now: float) -> bool:
        """Return whether the delay since the last failure has passed."""
        return self.num_failures == 0 or now >= self._next_attempt

    def reset(self) -> None:
        """Record a successful attempt: the next failure waits `first_s` again."""
        self.num_failures = 0
