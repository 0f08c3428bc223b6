"""verify and verify_on_device: a row's samples count up to the first that differs from the drafted token."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.worker.speculation.verification import verify, verify_on_device


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=8))
def test_samples_are_kept_up_to_the_first_miss(runs: list[list[bool]]) -> None:
    rows = np.repeat(np.arange(len(runs)) * 3, [len(run) for run in runs])
    verdict = verify(rows, np.array([is_match for run in runs for is_match in run]))
    kept: list[int] = []
    start = 0
    for run in runs:
        count = next((place for place, is_match in enumerate(run[:-1]) if not is_match), len(run) - 1) + 1
        kept += range(start, start + count)
        start += len(run)
    assert verdict.retained.tolist() == kept
    assert verdict.num_drafted.tolist() == [len(run) - 1 for run in runs]
    assert verdict.token_counts.sum() == len(kept)
    matches = torch.tensor([is_match for run in runs for is_match in run])
    is_retained, accepted = verify_on_device(torch.from_numpy(rows), matches, 1 + 3 * len(runs))
    assert is_retained.nonzero().flatten().tolist() == kept
    assert accepted[::3].tolist() == [*(verdict.token_counts - 1), 0]
    assert accepted.sum() == len(kept) - len(runs)
