"""Records of ranks in the log of the process that launched them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from quire.cluster.fleet.replica.launch import log_start, start_table
from quire.worker.rank.start_log import StartRecord

NAME = "quire.of_a_test"
OF_ALL = StartRecord(NAME, logging.INFO, "C++ ops use the instruction set avx2")
OF_SOME = StartRecord(NAME, logging.WARNING, "100% of it is copied")
OF_ONE = StartRecord(NAME, logging.INFO, "decode steps run op by op")


@pytest.fixture
def logged() -> Iterator[list[tuple[int, str]]]:
    """Level and message of each record of the test's logger."""
    records: list[tuple[int, str]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append((record.levelno, record.getMessage()))

    logger, handler = logging.getLogger(NAME), Handler()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_each_record_is_logged_once_with_its_ranks(logged: list[tuple[int, str]]) -> None:
    log_start("replica-1", [[OF_ALL, OF_SOME], [OF_ALL, OF_ALL, OF_ONE], [OF_SOME, OF_ALL]])
    assert logged == [
        (logging.INFO, f"replica-1: {OF_ALL.message}"),
        (logging.WARNING, f"replica-1, ranks 0, 2: {OF_SOME.message}"),
        (logging.INFO, f"replica-1, rank 1: {OF_ONE.message}"),
    ]


def test_start_table_has_the_slowest_rank_of_each_stage() -> None:
    ranks = [{"import": 1.5, "weights": 3.0}, {"import": 1.0, "weights": 7.25, "graphs": 0.5}]
    stages = {"place": 0.25, "processes": 2.0, "load": 8.0, "allocate": 1.0}
    assert start_table(stages, ranks).splitlines() == [
        "stage         seconds  slowest rank",
        "place            0.25",
        "processes        2.00",
        "  import         1.50  0",
        "load             8.00",
        "  weights        7.25  1",
        "allocate         1.00",
        "  graphs         0.50  1",
        "total           11.25",
    ]
