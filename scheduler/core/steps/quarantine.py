"""Quarantine: finds the request whose steps fail the worker group. Pure; requests are named by their arrival.

A request that is in a failed step is a *suspect* until it has sampled NUM_PROOF_STEPS tokens again. If the ranks
reported an exception, or a suspect is in a second failed step, the suspects are *tried*: each runs alone. The
request whose trial fails has failed the group at least twice, the last time without any other, and is the cause. If
a process died or hung during the trial, a second trial must confirm it: that may have had another reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

# Sampled steps after which a request is no suspect: its recomputed tokens, and one decode step.
NUM_PROOF_STEPS = 2
# Trials in which a process must die or hang before the request is the cause.
_NUM_DEADLY_TRIALS = 2


class Quarantine:
    """The suspects and their trials.

    Attributes:
        on_trial: the request that runs alone now; None if all may run.
    """

    def __init__(self) -> None:
        self.on_trial: int | None = None
        self._waiting: deque[int] = deque()
        self._num_steps_left: dict[int, int] = {}  # suspect |-> steps to sample until it is cleared
        self._num_failed_trials = 0  # of the request on trial

    @property
    def is_active(self) -> bool:
        """Return whether there are suspects."""
        return bool(self._num_steps_left)

    def on_failure(self, requests: Collection[int], *, is_step_error: bool) -> int | None:
        """Record a failed step.

        Args:
            requests: the requests in the step.
            is_step_error: the ranks reported an exception; otherwise a process died or hung, which an operator or
                the machine may have caused.

        Returns:
            The request that is the cause; None if it is not known.
        """
        if self.on_trial is not None and self.on_trial in requests:
            return self._on_failed_trial(self.on_trial, is_step_error)
        repeated = [request for request in requests if request in self._num_steps_left]
        self._num_steps_left |= dict.fromkeys(requests, NUM_PROOF_STEPS)
        tried = sorted(requests if is_step_error else repeated)
        self._waiting += (request for request in tried if request not in self._waiting)
        self._next_trial()
        return None

    def _on_failed_trial(self, request: int, is_step_error: bool) -> int | None:
        self._num_failed_trials += 1
        if is_step_error or self._num_failed_trials >= _NUM_DEADLY_TRIALS:
            self._clear(request)
            return request
        self._num_steps_left[request] = NUM_PROOF_STEPS
        return None

    def on_sampled(self, requests: Collection[int]) -> None:
        """Record a step that succeeded and sampled tokens of these requests."""
        for request in requests:
            if request not in self._num_steps_left:
                continue
            self._num_steps_left[request] -= 1
            if self._num_steps_left[request] <= 0:
                self._clear(request)

    def forget_ended(self, alive: Collection[int]) -> None:
        """Clear the suspects that have ended."""
        for request in [each for each in self._num_steps_left if each not in alive]:
            self._clear(request)

    def end_trials(self) -> None:
        """Let all requests run: the one on trial cannot run alone."""
        self._waiting.clear()
        self.on_trial = None

    def _clear(self, request: int) -> None:
        self._num_steps_left.pop(request, None)
        if request in self._waiting:
            self._waiting.remove(request)
        if request == self.on_trial:
            self.on_trial = None
            self._next_trial()

    def _next_trial(self) -> None:
        if self.on_trial is None and self._waiting:
            self.on_trial = self._waiting.popleft()
            self._num_failed_trials = 0
