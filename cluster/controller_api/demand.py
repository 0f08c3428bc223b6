"""Demand: what comes to one gateway for one model; the autoscaler counts with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests and their prompt tokens: that came since they were last counted, and that wait for a replica now."""

    num_requests: int = 0
    num_tokens: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
