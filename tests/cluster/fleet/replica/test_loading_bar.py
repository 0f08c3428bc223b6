"""LoadingBar: bytes of weights on a terminal, nothing elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from quire.cluster.fleet.replica.loading_bar import LoadingBar


def test_bar_shows_a_line_per_rank() -> None:
    screen = io.StringIO()
    with LoadingBar(2, Console(file=screen, force_terminal=True, width=100)) as bar:
        assert bar.is_shown
        bar.update(0, 1_500_000, 3_000_000)
        bar.update(1, 2_900_000, 3_000_000)
        assert bar._progress is not None
        bar._progress.refresh()
    shown = screen.getvalue()
    assert "weights, rank 0" in shown
    assert "1.5/3.0 MB" in shown
    assert "2.9/3.0 MB" in shown


def test_bar_shows_nothing_without_a_terminal() -> None:
    pipe = io.StringIO()
    with LoadingBar(1, Console(file=pipe)) as bar:
        assert not bar.is_shown
        bar.update(0, 10, 20)
    assert pipe.getvalue() == ""
