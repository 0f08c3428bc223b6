"""Messages of a command that waits."""

from __future__ import annotations

from queue import Queue

from quire.cluster.cli.deploy import report_wait

DEADLINE_S = 60.0


def test_wait_is_reported_until_it_is_over() -> None:
    lines: Queue[str] = Queue()
    with report_wait("demo: waiting for the controller", lines.put, interval_s=0.001):
        for _ in range(2):
            assert lines.get(timeout=DEADLINE_S).startswith("demo: waiting for the controller, ")


def test_short_wait_is_not_reported() -> None:
    lines: Queue[str] = Queue()
    with report_wait("demo", lines.put, interval_s=DEADLINE_S):
        pass
    assert lines.empty()
