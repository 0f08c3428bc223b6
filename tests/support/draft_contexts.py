"""Comparison of drafts that two runs made of the same known tokens; runs draft at different steps."""

from __future__ import annotations

from collections.abc import Mapping

# Known tokens and seed |-> drafted tokens.
Drafts = Mapping[tuple[tuple[int, ...], int], list[int]]


def assert_same_drafts(some: Drafts, others: Drafts, *, at_least: int = 4) -> None:
    """Assert that drafts after the same known tokens are equal as far as both go, and that there are some."""
    shared = some.keys() & others.keys()
    assert len(shared) >= at_least
    for key in shared:
        count = min(len(some[key]), len(others[key]))
        assert some[key][:count] == others[key][:count], key
