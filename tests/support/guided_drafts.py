"""GuidedDrafts: most drafts of recorded heads are right, as those of random heads rarely are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.proto.block_tables import IntArray, RowArray
from quire.worker.graphs.draft_graphs import DraftGraphs


class GuidedDrafts:
    """Replaces drafts by the tokens of known outputs, of which one in four is wrong; the host of a GPU does not wait.

    Args:
        known: prompt and output of all sequences.

    Attributes:
        num_certain, num_unsettled: rows that have drafted after settled steps, and after steps whose accepted tokens
            only the device knew.
    """

    def __init__(self, known: list[list[int]]) -> None:
        self.known = known
        self.num_certain = self.num_unsettled = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Guide the drafts of all graphs."""
        write = DraftGraphs._write

        def write_guided(graphs: DraftGraphs, rows: RowArray, limits: IntArray) -> None:
            write(graphs, rows, limits)
            self.guide(graphs, rows, limits)

        monkeypatch.setattr(DraftGraphs, "_write", write_guided)

    def guide(self, graphs: DraftGraphs, rows: RowArray, limits: IntArray) -> None:
        """Replace the drafts that the graphs have written."""
        table: Any = graphs._rows
        accepted, tokens = table.unsettled.accepted, getattr(table.token_ids, "host", table.token_ids)
        rng = np.random.default_rng(int(table.lens[rows].sum()))  # the same on all ranks
        for row, limit in zip(rows.tolist(), limits.tolist(), strict=True):
            length = int(table.lens[row]) + (0 if accepted is None else int(accepted.host[row]))
            text = tokens[row, :length].tolist()
            whole = next((own for own in self.known if own[:length] == text), [])
            for place, token_id in enumerate(whole[length : length + limit], length):
                tokens[row, place] = 11 if rng.random() < 0.25 else token_id
        if accepted is None:
            self.num_certain += rows.size
        else:
            self.num_unsettled += rows.size
