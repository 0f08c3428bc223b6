"""StartLog keeps what a rank logs while it starts, and changes nothing else of the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from quire.worker.rank.start_log import MAX_RECORDS, StartLog, StartRecord

NAME = "quire.of_a_test"


@pytest.fixture
def quiet() -> Iterator[None]:
    """Have loggers as in a process without a configuration: only warnings are enabled."""
    levels = {logger: logger.level for logger in (logging.getLogger("quire"), logging.root)}
    for logger, level in zip(levels, (logging.NOTSET, logging.WARNING), strict=True):
        logger.setLevel(level)
    yield
    for logger, level in levels.items():
        logger.setLevel(level)


@pytest.mark.usefixtures("quiet")
def test_records_of_the_block_are_kept_from_info_on() -> None:
    log, logger = StartLog(), logging.getLogger(NAME)
    logger.info("before")
    with log.recording():
        logger.debug("too detailed")
        logger.info("%d ranks", 2)
        logger.warning("late")
        logging.getLogger("another.library").warning("not quire's")
    logger.warning("after")
    assert log.take() == (
        StartRecord(NAME, logging.INFO, "2 ranks"), StartRecord(NAME, logging.WARNING, "late"),
    )  # fmt: skip
    assert log.take() == ()
    assert not logger.isEnabledFor(logging.INFO)


@pytest.mark.usefixtures("quiet")
def test_warnings_are_printed_as_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []

    class LastResort(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            printed.append(record.getMessage())

    monkeypatch.setattr(logging, "lastResort", LastResort(logging.WARNING))
    log, logger = StartLog(), logging.getLogger(NAME)
    for handlers, expected in (([], ["printed"]), ([logging.NullHandler()], [])):
        monkeypatch.setattr(logging.root, "handlers", handlers)
        printed.clear()
        with log.recording():
            logger.info("not printed")
            logger.warning("printed")
        assert printed == expected


def test_number_of_records_is_bounded() -> None:
    log = StartLog()
    with log.recording():
        for number in range(MAX_RECORDS + 1):
            logging.getLogger(NAME).warning("%d", number)
    assert len(log.take()) == MAX_RECORDS
