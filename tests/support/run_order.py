"""Order of the tests, and their distribution over processes.

``--random-order`` shuffles the files, and the tests in each file; ``--random-order=SEED`` repeats an order. With
pytest-xdist (``-n 2``) each file runs in one process, and all files that start Ray clusters run in the same one.
"""

from __future__ import annotations

import random
import secrets

import pytest

# Folders whose tests start Ray. Two clusters at once slow each other down on two cores.
RAY = ("tests/system/", "tests/cluster/ray_runtime/", "tests/cluster/offline/test_llm.py")


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


def arrange(items: list[pytest.Item], seed: int | None, *, is_worker: bool) -> None:
    """Put the tests into the order in which they run, in place.

    Args:
        seed: shuffles the files and the tests of each file; a file's tests stay together. None: no shuffle.
        is_worker: in a process of pytest-xdist, the tests of Ray are first, because they take longest together.
    """
    if seed is not None:
        _shuffle(items, random.Random(seed))
    if is_worker:
        items.sort(key=lambda item: scope_of(item.nodeid) != "ray")


def scope_of(nodeid: str) -> str:
    """Return the scope of a test, which runs in one process: its file, or one scope for all of Ray."""
    file = _file_of(nodeid)
    return "ray" if file.startswith(RAY) else file


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
