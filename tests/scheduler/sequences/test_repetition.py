"""RepetitionDetector: against a plain search of the end of the tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.proto.structured_outputs import RepetitionDetectionParams
from quire.scheduler.sequences.repetition import RepetitionDetector


def repeats(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    """Return whether the end of the tokens is a pattern that occurs often enough."""
    for size in range(params.min_pattern_size, params.max_pattern_size + 1):
        tail = tokens[-size * params.min_count :]
        if len(tail) == size * params.min_count and tail == tail[:size] * params.min_count:
            return True
    return False


@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(2, 4),
)
def test_detector_finds_the_first_repetition(tokens: list[int], one: int, other: int, count: int) -> None:
    params = RepetitionDetectionParams(max(one, other), min(one, other), count)
    first = next((end for end in range(1, len(tokens) + 1) if repeats(tokens[:end], params)), None)
    assert RepetitionDetector(params).push(tokens) == first


def test_detector_continues_where_it_was() -> None:
    params = RepetitionDetectionParams(3, 1, 3)
    detector = RepetitionDetector(params)
    assert detector.push([7, 1, 2, 3, 1, 2]) is None
    assert detector.push([3, 1, 2]) is None
    assert detector.push([3]) == 1
