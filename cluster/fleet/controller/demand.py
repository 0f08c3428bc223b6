"""Demand: one gateway's requests for one model, as input of the autoscaler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests and their prompt tokens.

    Attributes:
        num_requests, num_tokens: that arrived since the last report.
        num_waiting, num_waiting_tokens: that wait for a replica now.
    """

    num_requests: int = 0
    num_tokens: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
