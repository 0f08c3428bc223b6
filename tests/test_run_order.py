"""Order of the tests: shuffled by a seed; in a process of pytest-xdist, Ray and long files first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import pytest
from run_order import LONG, ROOT, arrange, rotate, scope_of

FILES = [
    "tests/worker/test_a.py",
    "tests/system/test_fleet.py",
    "tests/system/test_docs.py",
    "tests/chaos/test_chaos.py",
]


@dataclass(frozen=True)
class Item:
    nodeid: str


def arranged(seed: int | None, is_worker: bool = False, files: Sequence[str] = FILES) -> list[str]:
    items = [Item(f"{file}::test_{number}") for file in files for number in range(5)]
    arrange(cast("list[pytest.Item]", items), seed, is_worker=is_worker)
    return [item.nodeid for item in items]


def files_of(nodeids: list[str]) -> list[str]:
    """Return the file of each run of tests of one file."""
    files = [nodeid.split("::")[0] for nodeid in nodeids]
    return [file for place, file in enumerate(files) if place == 0 or files[place - 1] != file]


def test_seed_repeats_an_order() -> None:
    plain = arranged(None)
    assert arranged(3) == arranged(3)
    assert len({tuple(arranged(seed)) for seed in range(5)}) == 5
    assert all(sorted(arranged(seed)) == sorted(plain) and arranged(seed) != plain for seed in range(5))


def test_tests_of_a_file_stay_together() -> None:
    for seed in range(10):
        assert sorted(files_of(arranged(seed))) == sorted(FILES)


@pytest.mark.parametrize("seed", [None, 7])
def test_tests_of_ray_are_first_in_a_worker(seed: int | None) -> None:
    scopes = [scope_of(nodeid) for nodeid in arranged(seed, is_worker=True)]
    assert scopes[:10] == ["ray"] * 10
    assert "ray" not in scopes[10:]


@pytest.mark.parametrize("seed", [None, 7])
def test_long_files_are_next(seed: int | None) -> None:
    nodeids = arranged(seed, is_worker=True, files=[*FILES, *LONG[::-1]])
    assert files_of(nodeids)[2:4] == list(LONG)
    assert all((ROOT / file).is_file() for file in LONG)


def test_scope_is_the_file_or_one_for_all_of_ray() -> None:
    assert scope_of("tests/worker/rank/test_runner.py::test_x[a::b]") == "tests/worker/rank/test_runner.py"
    assert scope_of("tests/system/test_docs.py::test_y") == "tests/system/test_docs.py"
    assert scope_of("tests/cluster/fleet/ray/test_compat.py::test_y") == "ray"


def test_workers_collect_in_orders_of_their_own() -> None:
    folders = list("abcde")
    orders = [rotate(folders, worker, 3) for worker in range(3)]
    assert orders == [list("abcde"), list("bcdea"), list("deabc")]
    assert rotate([], 2, 3) == []


@pytest.mark.parametrize("seed", [None, 7])
def test_order_of_the_tests_does_not_depend_on_that_of_the_collection(seed: int | None) -> None:
    assert arranged(seed, is_worker=True, files=FILES[::-1]) == arranged(seed, is_worker=True)
