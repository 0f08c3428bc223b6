"""Fixed numbers of drafted tokens, instead of those that measurements recommend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from quire.proto.block_tables import IntArray, RowArray
from quire.scheduler.speculation.draft_lengths import DraftLengths


@contextmanager
def fixed_lengths(count: int | None) -> Iterator[None]:
    """Let every step draft `count` tokens per sequence; with None, as many as measurements recommend."""
    if count is None:
        yield
        return
    most_per_row = count

    def choose(
        lengths: DraftLengths, rows: RowArray, first_steps: Any, num_tokens: Any, limits: IntArray, most: int
    ) -> Any:
        lens = np.minimum(limits, min(most_per_row, lengths._max_len, most // rows.size)).astype(np.int32)
        return lens if lens.any() else None

    with (
        patch("quire.scheduler.core.planning.planner.ends_repeated", lambda *_: True),
        patch.object(DraftLengths, "is_due", lambda *_: True),
        patch.object(DraftLengths, "keeps_states", lambda *_: True),
        patch.object(DraftLengths, "choose", choose),
    ):
        yield
