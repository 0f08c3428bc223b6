"""Order of the tests, and their distribution over processes.

``--random-order`` shuffles the files, and the tests in each file; ``--random-order=SEED`` repeats an order. With
pytest-xdist (``-n 3``) each file runs in one process, and all files that start Ray clusters run in the same one.
"""

from __future__ import annotations

import functools
import random
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
# Each test that starts a Ray cluster has it. Two clusters at once slow each other down on two cores.
RAY_MARKER = "pytest.mark.cluster"
# The next ones, so that no process runs one of them after the others have ended: a minute of a core each, and more if
# the C++ ops are compiled for all instruction sets.
LONG = "tests/kernels/native/test_instruction_sets.py", "tests/worker/models/test_exactness.py"
_FIRST = {scope: place for place, scope in enumerate(("ray", *LONG))}


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--random-order",
        nargs="?",
        const=secrets.randbelow(10**6),
        type=int,
        metavar="SEED",
        help="shuffle the tests; the seed, drawn unless given, is printed",
    )


def seed_of(config: pytest.Config) -> int | None:
    """Return the seed of --random-order, in a worker of pytest-xdist the one that its controller has drawn."""
    seed: int | None = getattr(config, "workerinput", vars(config.option))["random_order"]
    return seed


def rotate(entries: Sequence[T], worker: int, num_workers: int) -> list[T]:
    """Return the entries of a folder in the order in which a worker of pytest-xdist collects them.

    Each worker imports all test modules, and keeps the bytecode of those that have none yet: 6 s of processor time in
    a fresh clone. Workers that begin at different folders find most of it.
    """
    first = len(entries) * worker // num_workers
    return [*entries[first:], *entries[:first]]


def arrange(items: list[pytest.Item], seed: int | None, *, is_worker: bool) -> None:
    """Put the tests into the order in which they run, in place.

    Args:
        seed: shuffles the files and the tests of each file; a file's tests stay together. None: no shuffle.
        is_worker: in a process of pytest-xdist, which has collected the folders in an order of its own; the tests of
            Ray are first, because they take longest together, and then those of LONG.
    """
    if is_worker:
        items.sort(key=lambda item: _file_of(item.nodeid).split("/"))
    if seed is not None:
        _shuffle(items, random.Random(seed))
    if is_worker:
        items.sort(key=lambda item: _FIRST.get(scope_of(item.nodeid), len(_FIRST)))


def scope_of(nodeid: str) -> str:
    """Return the scope of a test, which runs in one process: its file, or one scope for all of Ray."""
    file = _file_of(nodeid)
    return "ray" if _starts_ray(file) else file


@functools.cache
def _starts_ray(file: str) -> bool:
    """Return whether the file has a marked test. Reads its text: the controller of pytest-xdist imports no tests."""
    path = ROOT / file
    return path.is_file() and RAY_MARKER in path.read_text()


def _shuffle(items: list[pytest.Item], rng: random.Random) -> None:
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(_file_of(item.nodeid), []).append(item)
    shuffled = list(files.values())
    rng.shuffle(shuffled)
    for own in shuffled:
        rng.shuffle(own)
    items[:] = [item for own in shuffled for item in own]


def _file_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]
