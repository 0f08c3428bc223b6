"""Fixed numbers of drafted tokens, instead of as many as the configuration allows where these are measured to pay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from quire.proto.block_tables import IntArray
from quire.scheduler.speculation.draft_switch import DraftSwitch


@contextmanager
def fixed_lengths(count: int | None) -> Iterator[None]:
    """Let every step draft `count` tokens per sequence, whatever it costs; with None, where drafts pay."""
    if count is None:
        yield
        return
    most_per_row, choose_any = count, DraftSwitch.choose

    def choose(switch: DraftSwitch, first_steps: Any, limits: IntArray, most: int) -> IntArray | None:
        return choose_any(switch, first_steps, np.minimum(limits, most_per_row), most)

    with (
        patch("quire.scheduler.core.planning.planner.ends_repeated", lambda *_: True),
        patch.object(DraftSwitch, "is_on", lambda *_: True),
        patch.object(DraftSwitch, "keeps_states", lambda *_, **__: True),
        patch.object(DraftSwitch, "choose", choose),
    ):
        yield
