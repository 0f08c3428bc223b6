"""Faults under mixed work: nothing is lost, no answer changes, nothing leaks.

A failed round is repeated by `python -m tests.chaos --sites SITE --seed SEED`, see `tests/chaos/__main__.py`.
"""

from __future__ import annotations

import asyncio

import pytest
from far_network import NetworkNotPermitted

from tests.chaos.run import FAULTS_PER_ROUND, REQUESTS_PER_ROUND, run_round

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

# Short ones; each fails the ranks or breaks every stream.
QUICK_KINDS = "exception", "kill", "connection", "poison"
# 200 faults under at least 2,000 requests, in an hour.
SEEDS = range(2, 27)


def check_round(
    site: str, seed: int, num_requests: int, num_faults: int, kinds: tuple[str, ...] = ()
) -> None:
    report = asyncio.run(run_round(site, seed, num_requests, num_faults, kinds))
    assert report.problems == []
    assert report.tally.num_done >= num_requests
    assert report.num_faults == num_faults


def test_faults_cost_no_request_and_change_no_answer() -> None:
    check_round("single", 1, 40, len(QUICK_KINDS), QUICK_KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_faults_of_all_kinds_cost_no_request(seed: int) -> None:
    check_round(("single", "fleet")[seed % 2], seed, REQUESTS_PER_ROUND, FAULTS_PER_ROUND)


@pytest.mark.slow
def test_network_between_the_nodes_of_a_fleet_costs_no_request() -> None:
    try:
        check_round("network", 5, 80, 6)
    except NetworkNotPermitted as error:
        pytest.skip(str(error))
