"""Seeds of the simulation: fleets with faults, in simulated time.

A failing seed is repeated exactly, with the fleet's log, by

    PYTHONPATH=tests/support python -m tests.simulation --log --seeds SEED
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.simulation.scenario import FAULTS, run_seed

NUM_QUICK, NUM_SLOW, SEEDS_PER_TEST = 50, 10_000, 50


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Faults are logged as in a real fleet."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run_seeds(first: int, count: int) -> tuple[Counter[str], Counter[str]]:
    """Run seeds; return the faults and the outcomes of all. Raises AssertionError with the number of a bad one."""
    faults, outcomes = Counter[str](), Counter[str]()
    for seed in range(first, first + count):
        try:
            outcome = run_seed(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        faults += outcome.faults
        outcomes += outcome.outcomes
    return faults, outcomes


@pytest.mark.parametrize("first", range(0, NUM_QUICK, SEEDS_PER_TEST))
def test_fleet_keeps_its_promises(first: int) -> None:
    faults, outcomes = run_seeds(first, SEEDS_PER_TEST)
    assert set(faults) == {fault.__name__ for fault, _ in FAULTS}, "a kind of fault never happens"
    assert outcomes["complete"] > 0.7 * outcomes.total()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(NUM_QUICK, NUM_SLOW, 5 * SEEDS_PER_TEST))
def test_fleet_keeps_its_promises_in_many_worlds(first: int) -> None:
    run_seeds(first, 5 * SEEDS_PER_TEST)


def test_equal_seeds_give_equal_runs() -> None:
    digests = [run_seed(seed).digest for seed in (3, 4, 13)]
    assert [run_seed(seed).digest for seed in (3, 4, 13)] == digests
    assert len(set(digests)) == 3
