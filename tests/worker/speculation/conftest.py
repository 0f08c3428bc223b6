"""Steps that draft as many tokens as they may, whatever this machine's times say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.draft_lengths import fixed_lengths


@pytest.fixture(autouse=True)
def all_steps_draft() -> Iterator[None]:
    with fixed_lengths(100):
        yield
