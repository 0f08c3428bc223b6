"""Expected lengths of outputs."""

from __future__ import annotations

import numpy as np
import pytest

from quire.scheduler.core.waiting.output_lengths import WINDOW, OutputLengths


def learned(*ends: tuple[int, bool]) -> OutputLengths:
    lengths = OutputLengths()
    for _ in range(16):  # the estimate is made again after 16 ends
        for num_tokens, has_stopped in ends:
            lengths.add(num_tokens, has_stopped)
    return lengths


def test_mean_of_stopped_outputs_is_expected() -> None:
    lengths = learned((10, True), (20, True), (30, True))
    assert lengths.expect_one(1000) == pytest.approx(20.0)
    assert lengths.expect_one(20) == pytest.approx(50 / 3)
    assert lengths.expect_one(5) == pytest.approx(5.0)


def test_further_tokens_are_those_of_outputs_that_are_longer() -> None:
    lengths = learned((10, True), (20, True), (30, True))
    assert lengths.expect_one(1000, 15) == pytest.approx(10.0)  # 5 or 15
    assert lengths.expect_one(22, 15) == pytest.approx(6.0)  # 5 or 7
    assert lengths.expect_one(1000, 30) == 0.0
    both = lengths.expect(np.array([1000.0, 20.0]), np.array([0.0, 0.0]))
    assert both.tolist() == pytest.approx([20.0, 50 / 3])


def test_output_that_ended_by_its_limit_would_have_been_longer() -> None:
    assert learned((16, False)).expect_one(400) == pytest.approx(400.0)
    # Half of the outputs stop at 10; the others ended by a limit of 16, and later ones go to 40.
    mixed = learned((10, True), (16, False), (40, True), (40, True))
    assert mixed.expect_one(1000) == pytest.approx(0.25 * 10 + 0.75 * 40, rel=0.03)


def test_nothing_is_expected_before_the_first_end() -> None:
    assert OutputLengths().expect_one(100) == 0.0


def test_only_the_latest_outputs_count() -> None:
    lengths = OutputLengths()
    for _ in range(100):
        lengths.add(1000, has_stopped=True)
    for _ in range(WINDOW + 16):
        lengths.add(10, has_stopped=True)
    assert lengths.expect_one(5000) == pytest.approx(10.0)
