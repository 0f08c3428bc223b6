"""PendingPairs gives each row the pairs that were added since it was last taken or forgotten."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.worker.speculation.pending_pairs import Pairs, PendingPairs

NUM_ROWS = 5

ROWS = st.lists(st.integers(0, NUM_ROWS - 1), unique=True)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), ROWS.filter(bool), st.integers(0, 1 << 30)),
        st.tuples(st.sampled_from(["take", "forget"]), ROWS, st.just(0)),
        st.tuples(st.just("clear"), st.just([]), st.just(0)),
    ),
    max_size=40,
)


class Model:
    """The pairs of each row as a list of positions, and the sequence that each row is at."""

    def __init__(self) -> None:
        self.kept: dict[int, list[int]] = {row: [] for row in range(NUM_ROWS)}
        self.lens = dict.fromkeys(range(NUM_ROWS), 0)

    def step(self, rows: list[int], seed: int) -> Pairs:
        """Return a step of these rows, of which some tokens are no pairs; features are row and position."""
        rng = np.random.default_rng(seed)
        counts = rng.integers(1, 4, len(rows)).astype(np.int32)
        num_rejected = rng.integers(0, 3, len(rows)) if rng.random() < 0.5 else np.zeros(len(rows), np.int64)
        starts = np.array([self.lens[row] for row in rows], np.int32)
        features, index = list[tuple[int, int]](), list[int]()
        for row, count, rejected in zip(rows, counts.tolist(), num_rejected.tolist(), strict=True):
            positions = range(self.lens[row], self.lens[row] + count)
            index += range(len(features), len(features) + count)
            features += [(row, position) for position in positions] + [(-1, -1)] * rejected
            self.kept[row] += positions
            self.lens[row] += count
        is_whole = not num_rejected.any()
        return Pairs(
            np.array(rows), starts, counts, torch.tensor(features), None if is_whole else np.array(index)
        )


def check_places(taken: Pairs, model: Model) -> None:
    """Check the features of pairs in four places of each row, and the last pairs alone."""
    kept = [[(row, position) for position in model.kept[row]] for row in taken.rows.tolist()]
    places = taken.padded_features(4).reshape(len(kept), 4, 2).tolist()
    for own, found in zip(kept, places, strict=True):
        assert [tuple(each) for each in found] == [own[min(place, len(own) - 1)] for place in range(4)]
    newest = taken.newest()
    assert [tuple(each) for each in newest.own_features().tolist()] == [own[-1] for own in kept]
    assert newest.starts.tolist() == [own[-1][1] for own in kept]
    assert newest.counts.tolist() == [1] * len(kept)


@given(STEPS)
def test_rows_get_their_own_pairs_in_order(steps: list[tuple[str, list[int], int]]) -> None:
    pending, model = PendingPairs(NUM_ROWS), Model()
    for kind, rows, seed in steps:
        if kind == "add":
            pending.add(model.step(rows, seed))
        elif kind == "clear":
            pending.clear()
            model.kept = {row: [] for row in range(NUM_ROWS)}
        else:
            expected = [(row, position) for row in sorted(rows) for position in model.kept[row]]
            assert pending.has(np.array(rows, np.int64)) == bool(expected)
            if kind == "forget":
                pending.forget(np.array(rows, np.int64))
            elif (taken := pending.take(np.array(sorted(rows), np.int64))) is None:
                assert not expected
            else:
                assert [tuple(each) for each in taken.own_features().tolist()] == expected
                assert taken.rows.tolist() == sorted({row for row, _ in expected})
                assert taken.starts.tolist() == [model.kept[row][0] for row in taken.rows.tolist()]
                assert taken.counts.tolist() == [len(model.kept[row]) for row in taken.rows.tolist()]
                check_places(taken, model)
            for row in rows:
                model.kept[row] = []
    if not any(model.kept.values()):
        assert pending.num_tokens == pending.num_bytes == 0
    taken = pending.take_all()
    assert (0 if taken is None else taken.counts.sum()) == sum(map(len, model.kept.values()))
    assert pending.num_tokens == pending.num_bytes == 0


def test_steps_are_dropped_when_no_row_needs_them() -> None:
    pending, model = PendingPairs(NUM_ROWS), Model()
    for _ in range(3):
        pending.add(model.step([0, 1], 0))
    num_tokens = pending.num_tokens
    pending.forget(np.array([0]))
    assert pending.num_tokens == num_tokens  # the steps are row 1's as well
    pending.add(model.step([0], 0))
    pending.forget(np.array([1]))
    assert 0 < pending.num_tokens < num_tokens
    pending.forget(np.array([0]))
    assert pending.num_tokens == 0
