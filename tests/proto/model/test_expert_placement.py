"""The placement of experts by their load: even ranks, no expert twice on a rank, and few moves."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from quire.proto.model.expert_placement import first_placement, imbalance, rebalance, slots_of_ranks

# Loads of the example in EPLB's README: two layers of 12 experts.
EXAMPLE = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[float], int, int]:
    """Return loads, a number of slots, and a number of ranks."""
    num_ranks = draw(st.integers(1, 6))
    loads = draw(st.lists(st.floats(0, 1e6), min_size=num_ranks, max_size=24))
    num_redundant = draw(st.integers(0, len(loads) * (num_ranks - 1)))
    return loads, len(loads) + num_redundant, num_ranks


@given(mixtures(), st.integers(1, 3))
def test_each_rank_has_each_expert_at_most_once(mixture: tuple[list[float], int, int], times: int) -> None:
    loads, num_slots, num_ranks = mixture
    placement = first_placement(len(loads), num_slots)
    for _ in range(times):
        placement = rebalance(loads, placement, num_ranks)
        loads = loads[1:] + loads[:1]
    assert len(placement) == num_slots
    assert set(placement) == set(range(len(loads)))
    for slots in slots_of_ranks(num_slots, num_ranks):
        assert len({placement[slot] for slot in slots}) == len(slots)


@given(mixtures())
def test_rebalancing_again_moves_nothing(mixture: tuple[list[float], int, int]) -> None:
    loads, num_slots, num_ranks = mixture
    once = rebalance(loads, first_placement(len(loads), num_slots), num_ranks)
    again = rebalance(loads, once, num_ranks)
    assert again == once


def test_loads_of_the_published_example_become_even() -> None:
    """Sixteen replicas on eight GPUs: the busiest has at most 1.2 times the mean."""
    for loads in EXAMPLE:
        first = first_placement(12, 16)
        placement = rebalance(loads, first, 8)
        assert imbalance(loads, placement, 8) < 1.2 < imbalance(loads, first, 8)
        replicas = Counter(placement)
        assert replicas[loads.index(max(loads))] > 1


def test_one_busy_expert_is_on_every_rank() -> None:
    placement = rebalance([1000, 1, 1, 1], first_placement(4, 7), 4)
    assert Counter(placement)[0] == 4
    assert imbalance([1000, 1, 1, 1], placement, 4) < 1.01


def test_what_can_stay_stays() -> None:
    loads = [8.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    first = first_placement(6, 8)
    placement = rebalance(loads, first, 2)
    again = rebalance([9.0, *loads[1:]], placement, 2)
    assert again == placement
