"""Faults under mixed work: nothing is lost, no answer changes, nothing leaks."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.faults import FAULTS
from tests.chaos.run import run

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_faults_cost_no_request_and_change_no_answer() -> None:
    report = asyncio.run(run(num_requests=300, num_faults=2 * len(FAULTS), seed=1))
    assert report.tally.lost == []
    assert report.tally.changed == []
    assert report.leaks == []
    assert set(report.recovery_s) == set(FAULTS)
