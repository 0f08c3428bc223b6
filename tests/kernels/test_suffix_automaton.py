"""SuffixAutomaton: the C++ one equals the reference, and both find the longest repeated suffix."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.native.library import is_available
from quire.kernels.native.suffix_automaton import NativeSuffixAutomaton
from quire.kernels.suffix_automaton import SuffixAutomaton, SuffixIndex

texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), max_size=60))
COUNT = 6


def longest_repeated_suffix(text: list[int]) -> int:
    """Return the length of the longest suffix that also ends earlier in the text."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[-length:]
        if any(text[end - length : end] == suffix for end in range(length, len(text))):
            return length
    return 0


def build(index: SuffixIndex, text: list[int], cut: int) -> SuffixIndex:
    """Append a text in two parts."""
    index.extend(np.array(text[:cut], np.int32))
    index.extend(np.array(text[cut:], np.int32))
    return index


@given(texts, st.integers(0, 60), st.integers(1, 4), st.integers(1, 8))
def test_proposal_continues_an_occurrence_of_the_longest_suffix(
    text: list[int], cut: int, min_len: int, max_len: int
) -> None:
    token_ids, match_len = build(SuffixAutomaton(), text, cut).propose(COUNT, min_len, max_len)
    longest = min(longest_repeated_suffix(text), max_len)
    assert match_len == (longest if longest >= min_len else 0)
    assert token_ids.size == (COUNT if match_len else 0)
    if match_len:
        whole, suffix = text + token_ids.tolist(), text[len(text) - match_len :]
        starts = [end for end in range(match_len, len(text)) if text[end - match_len : end] == suffix]
        assert any(whole[start : start + COUNT] == token_ids.tolist() for start in starts)


@pytest.mark.skipif(not is_available(), reason="no C++ compiler")
@given(texts, st.integers(0, 60), st.integers(1, 4), st.integers(1, 8))
def test_native_equals_reference(text: list[int], cut: int, min_len: int, max_len: int) -> None:
    ours, length = build(NativeSuffixAutomaton(), text, cut).propose(COUNT, min_len, max_len)
    expected, expected_len = build(SuffixAutomaton(), text, cut).propose(COUNT, min_len, max_len)
    assert (ours.tolist(), length) == (expected.tolist(), expected_len)


@pytest.mark.skipif(not is_available(), reason="no C++ compiler")
def test_native_finds_matches_in_a_long_text() -> None:
    text = np.random.default_rng(0).integers(0, 1000, 20_000).astype(np.int32)
    index = NativeSuffixAutomaton()
    index.extend(text)
    index.extend(text[5000:5010])
    token_ids, match_len = index.propose(8, 2, 1 << 30)
    assert match_len == 10
    assert token_ids.tolist() == text[5010:5018].tolist()


def test_newest_occurrence_is_continued() -> None:
    index = SuffixAutomaton()
    index.extend(np.array([1, 2, 3, 1, 2, 4, 1, 2], np.int32))
    assert index.propose(2, 1, 8)[0].tolist() == [4, 1]
