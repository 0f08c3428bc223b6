"""Rounds of chaos: a site under work and faults, its answers, its leaks and its times of recovery.

The work and the faults are those of the seed; their coincidence in time is not.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from .fleet import FleetSite, NetworkSite
from .jobs import make_jobs
from .single_server import SingleServer
from .site import Site, held_when_idle, until_answered
from .work import Tally, Work

# A replica whose ranks fail more than 10 times in 5 minutes is given up, so each round has servers of its own.
FAULTS_PER_ROUND = 8
REQUESTS_PER_ROUND = 80

_log = logging.getLogger(__name__)

SITES: dict[str, Callable[[random.Random], Site]] = {
    "single": SingleServer,
    "fleet": FleetSite,
    "network": NetworkSite,
}


@dataclass(slots=True)
class Report:
    """The outcome of rounds.

    Attributes:
        stuck: faults after which the servers did not answer again.
        recovery_s: kind of fault |-> times until a new request was answered.
        failed_seeds: of rounds in which something was lost, changed or leaked.
    """

    tally: Tally = field(default_factory=Tally)
    leaks: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    recovery_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    failed_seeds: list[int] = field(default_factory=list)

    @property
    def num_faults(self) -> int:
        return sum(map(len, self.recovery_s.values()))

    @property
    def problems(self) -> list[str]:
        return [*self.stuck, *self.tally.lost, *self.tally.changed, *self.leaks]

    def add(self, other: Report) -> None:
        """Add the report of another round."""
        self.tally.num_done += other.tally.num_done
        self.tally.lost += other.tally.lost
        self.tally.changed += other.tally.changed
        self.leaks += other.leaks
        self.stuck += other.stuck
        self.failed_seeds += other.failed_seeds
        for kind, seconds in other.recovery_s.items():
            self.recovery_s[kind] += seconds


async def run_round(
    site_name: str,
    seed: int,
    num_requests: int = REQUESTS_PER_ROUND,
    num_faults: int = FAULTS_PER_ROUND,
    kinds: tuple[str, ...] = (),
) -> Report:
    """Start servers, compare the work of two runs of them, one of them with faults, and look for leaks.

    Args:
        kinds: of faults, in their order; empty for random ones of all.
    """
    rng, report = random.Random(seed), Report()
    site = SITES[site_name](rng)
    try:
        await site.start()
        jobs = make_jobs(num_requests, rng)
        work = Work(site.doors, jobs)
        await work.run_undisturbed()
        site.choose_poison(work.used_token_ids)
        before = site.resources()
        plan = _plan(site, num_faults, kinds, rng)
        harming = asyncio.ensure_future(_make_faults(site, plan, rng, report))
        report.tally = work.tally
        await asyncio.gather(harming, work.run(until=harming))
        report.leaks += await held_when_idle(site.observer)
        report.leaks += site.resources().leaks_since(before)
    finally:
        report.leaks += await site.close()
    if report.problems:
        report.failed_seeds.append(seed)
    return report


def _plan(site: Site, num_faults: int, kinds: tuple[str, ...], rng: random.Random) -> list[str]:
    """Return the kinds of the faults, in their order."""
    if kinds:
        known = [kind for kind in kinds if kind in site.faults]
        return [known[number % len(known)] for number in range(num_faults)] if known else []
    drawn: list[str] = []
    while len(drawn) < num_faults:  # each kind as often as the others
        drawn += rng.sample(sorted(site.faults), len(site.faults))
    return drawn[:num_faults]


async def _make_faults(site: Site, kinds: list[str], rng: random.Random, report: Report) -> None:
    """Cause the faults one after the other; each is recovered from before the next one."""
    for kind in kinds:
        await asyncio.sleep(rng.uniform(0.1, 1.0))
        _log.info("fault: %s", kind)
        started = time.monotonic()
        try:
            await site.faults[kind]()
            await until_answered(site.observer)
            report.recovery_s[kind].append(time.monotonic() - started)
            await site.until_settled()
        except (TimeoutError, AssertionError) as error:
            report.stuck.append(f"no recovery from {kind} in {time.monotonic() - started:.0f} s: {error!r}")
            return
        _log.info("recovered after %.2f s", report.recovery_s[kind][-1])
