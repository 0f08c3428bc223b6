"""Updates of sequences from the scheduler's batches."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.cluster.text.requests.sequence_update import SequenceUpdate, updates_by_handle
from quire.proto.stream import Finish, FinishReason, TokenBatch

# Steps, each with (handle, whether the sequence ends) pairs.
STEPS = st.lists(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=5), max_size=5)


def batches_of(steps: list[list[tuple[int, bool]]]) -> list[TokenBatch]:
    """Return a batch per step; a sequence that has ended gets nothing more."""
    ended: set[int] = set()
    batches = []
    for step, updates in enumerate(steps, start=1):
        handles = [handle for handle, _ in updates if handle not in ended]
        ends = {handle for handle, has_ended in updates if has_ended and handle not in ended}
        ended |= ends
        ids = [100 * step + place for place in range(len(handles))]
        finished = tuple(Finish(handle, FinishReason.STOP) for handle in sorted(ends))
        batches.append(
            TokenBatch(step, np.array(handles, np.int32), np.array(ids, np.int32), finished=finished)
        )
    return batches


@given(STEPS)
def test_updates_of_several_batches_equal_those_of_each_merged(steps: list[list[tuple[int, bool]]]) -> None:
    batches = batches_of(steps)
    expected: dict[int, SequenceUpdate] = {}
    for batch in batches:
        for handle, update in updates_by_handle(batch):
            expected.setdefault(handle, SequenceUpdate()).extend(update)
    assert dict(updates_by_handle(*batches)) == expected
