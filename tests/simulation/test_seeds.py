"""Seeds of the simulation: fleets with faults, in simulated time.

A failing seed is repeated exactly, with the fleet's log, by

    PYTHONPATH=tests/support python -m tests.simulation --log --seeds SEED
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulation.scenario import FAULTS, run_seed

NUM_QUICK, NUM_SLOW, SEEDS_PER_TEST = 50, 10_000, 50
# Time of a process for a few seeds on a very busy machine.
PROCESS_TIMEOUT_S = 400.0


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Faults are logged as in a real fleet."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run_seeds(first: int, count: int) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Run seeds; return the faults, outcomes and reads of all. Raises AssertionError with the number of a bad one."""
    faults, outcomes, reads = Counter[str](), Counter[str](), Counter[str]()
    for seed in range(first, first + count):
        try:
            outcome = run_seed(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        faults += outcome.faults
        outcomes += outcome.outcomes
        reads += outcome.reads
    return faults, outcomes, reads


@pytest.mark.parametrize("first", range(0, NUM_QUICK, SEEDS_PER_TEST))
def test_fleet_keeps_its_promises(first: int) -> None:
    faults, outcomes, reads = run_seeds(first, SEEDS_PER_TEST)
    assert set(faults) == {fault.__name__ for fault, _ in FAULTS}, "a kind of fault never happens"
    assert outcomes["complete"] > 0.7 * outcomes.total()
    assert reads["ordered"] > reads["read"] > 0, "no blocks move, or all reads succeed"
    assert reads["warmed"] > 0, "no new replica reads what prompts share"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(NUM_QUICK, NUM_SLOW, 5 * SEEDS_PER_TEST))
def test_fleet_keeps_its_promises_in_many_worlds(first: int) -> None:
    run_seeds(first, 5 * SEEDS_PER_TEST)


def test_equal_seeds_give_equal_runs() -> None:
    digests = [run_seed(seed).digest for seed in (3, 4, 13)]
    assert [run_seed(seed).digest for seed in (3, 4, 13)] == digests
    assert len(set(digests)) == 3


@pytest.mark.timeout(2 * PROCESS_TIMEOUT_S)
def test_processes_write_equal_events(tmp_path: Path) -> None:
    """Hashes of strings, the modules that are loaded and the time of day differ."""
    written = []
    for hash_seed in ("1", "2"):
        events = tmp_path / hash_seed
        subprocess.run(
            [sys.executable, "-m", "tests.simulation", "--seeds", "5-6", "--events", str(events)],
            env={
                **os.environ,
                "PYTHONHASHSEED": hash_seed,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            check=True,
            timeout=PROCESS_TIMEOUT_S,
            cwd=Path(__file__).parents[2],
        )
        written.append(events.read_text())
    assert written[0] == written[1]
