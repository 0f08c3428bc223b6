"""Days of the autoscaling benchmark, in a fleet that is one queue."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import autoscale_day
from benchmarks.autoscale_day import Day, compare, follow, latest_maximum, make_day, run_policy, tokens_per_s
from benchmarks.trace import Trace
from quire.cluster.simulation.traces import TracedRequest

RATE = tokens_per_s()


def make(*replica_seconds: float) -> Day:
    """Return a day of one request per second, with the time that each takes."""
    tokens = np.array([RATE * each for each in replica_seconds])
    return Day(tokens, np.ones(tokens.size), np.ones(tokens.size))


class TestRunPolicy:
    def test_requests_wait_for_those_before(self) -> None:
        outcome = run_policy(make(5.0, 5.0, 5.0, 0.0), follow(np.ones(4)), 1, 30.0)
        assert outcome.within == 1.0, "the last request with work has 8 s of it before it, and 10 s may wait"
        assert run_policy(make(30.0, 5.0), follow(np.ones(2)), 1, 30.0).within == 0.5

    def test_replica_works_after_its_cold_start_and_costs_from_its_start(self) -> None:
        day = make(*[2.0] * 60)
        targets = np.full(60, 3.0)
        slow, fast = run_policy(day, follow(targets), 1, 20.0), run_policy(day, follow(targets), 1, 1.0)
        assert slow.replica_seconds == fast.replica_seconds == 180.0
        assert slow.within < fast.within == 1.0

    def test_stopped_replica_costs_nothing_more(self) -> None:
        targets = np.array([3.0] * 10 + [1.0] * 10)
        assert run_policy(make(*[0.1] * 20), follow(targets), 3, 5.0).replica_seconds == 40.0


class TestDay:
    def test_day_keeps_the_recording_load_at_noon_and_a_tenth_at_night(self) -> None:
        trace = Trace("even", tuple(TracedRequest(n, n / 4, 100, 1) for n in range(2400)))
        day = make_day(trace, seed=3, seconds=7200)
        assert day.requests[3300:3900].sum() == pytest.approx(2400, rel=0.05)
        assert day.requests[:300].sum() == pytest.approx(120, rel=0.4)
        assert np.array_equal(day.tokens, make_day(trace, seed=3, seconds=7200).tokens)

    def test_policies_that_know_more_need_less(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(autoscale_day, "MAX_REPLICAS", 8)
        rng = np.random.default_rng(1)
        seconds = np.arange(4800)
        load = 0.1 + 0.45 * (1 - np.cos(2 * np.pi * seconds / seconds.size))
        requests = rng.poisson(2 * load) * np.where(seconds % 600 < 30, 10, 1)
        day = Day(1000.0 * requests.astype(np.float64), requests.astype(np.float64), load.astype(np.float64))
        outcomes = compare(day, 30.0)
        costs = {policy: outcome.replica_seconds for policy, outcome in outcomes.items()}
        assert costs["oracle"] < costs["curve"] < costs["fixed"]
        assert all(outcomes[policy].within >= 0.99 for policy in ("fixed", "curve", "oracle"))

    def test_latest_maximum_looks_back(self) -> None:
        values = np.array([1.0, 5.0, 2.0, 0.0, 0.0, 3.0])
        assert latest_maximum(values, 3).tolist() == [1.0, 5.0, 5.0, 5.0, 2.0, 3.0]
