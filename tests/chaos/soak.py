"""Steady load with a fault now and then: memory, descriptors, threads and blocks stay flat.

    PYTHONPATH=tests/support:. python -m tests.chaos.soak --minutes 60 --json FILE

Runs `quire serve demo` with two ranks for so long, under the mixed work of `tests.chaos`, with one random fault per
`--interval-s`. While the server is idle between two batches of work, it counts what the server holds. Exit status 1
if a count of the second half exceeds those of the first half.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from collections.abc import Sequence

from benchmarks.common import Figure, make_parser
from benchmarks.common import report as print_figures
from quire.proto.errors import QuireError

from .jobs import make_jobs
from .single_server import SingleServer
from .site import Resources, held_when_idle, until_answered
from .work import Work

# Jobs between two looks at the resources.
JOBS_PER_BATCH = 24
# Memory that a process may take back and forth.
BYTES_SLACK = 48 << 20
THREAD_SLACK = 4

_log = logging.getLogger(__name__)


class Soak:
    """One soak.

    Attributes:
        problems: lost and changed requests, and leaks, in words.
        samples: resources after each batch of work.
    """

    def __init__(self, site: SingleServer, rng: random.Random, interval_s: float) -> None:
        self.problems: list[str] = []
        self.samples: list[Resources] = []
        self.num_requests = self.num_faults = 0
        self._site = site
        self._rng = rng
        self._interval_s = interval_s

    async def run(self, seconds: float) -> None:
        """Work for so long, in batches, with a fault in the first batch after each interval."""
        end, next_fault_at = time.monotonic() + seconds, time.monotonic()
        while time.monotonic() < end:
            is_due = time.monotonic() >= next_fault_at
            if is_due:
                next_fault_at = time.monotonic() + self._interval_s
            await self._run_batch(is_due)

    async def _run_batch(self, has_fault: bool) -> None:
        num_problems = len(self.problems)
        work = Work(self._site.doors, make_jobs(JOBS_PER_BATCH, self._rng))
        await work.run_undisturbed()
        self._site.choose_poison(work.used_token_ids)
        harming = asyncio.ensure_future(self._harm() if has_fault else asyncio.sleep(0))
        await asyncio.gather(harming, work.run(until=harming))
        self.problems += [*work.tally.lost, *work.tally.changed]
        await until_answered(self._site.observer)
        self.problems += await held_when_idle(self._site.observer)
        self.num_requests += work.tally.num_done
        self.samples.append(self._site.resources())
        _log.info("%d requests, %d faults, %s", self.num_requests, self.num_faults, self.samples[-1])
        for problem in self.problems[num_problems:]:
            _log.error("problem: %s", problem)

    async def _harm(self) -> None:
        kind = self._rng.choice(sorted(self._site.faults))
        _log.info("fault: %s", kind)
        await self._site.faults[kind]()
        self.num_faults += 1


def growth_of(samples: Sequence[Resources]) -> list[str]:
    """Describe what the second half of the samples holds beside the first half, the first quarter left out."""
    quarter = len(samples) // 4
    first, second = samples[quarter : 2 * quarter + 1], samples[2 * quarter + 1 :]
    if not first or not second:
        return []
    grown = []
    for name, slack in {"num_bytes": BYTES_SLACK, "num_threads": THREAD_SLACK}.items():
        before, after = (max(getattr(each, name) for each in part) for part in (first, second))
        if after > before + slack:
            grown.append(f"{name} grew from {before} to {after}")
    most = max(first, key=lambda each: each.num_descriptors)
    return grown + min((each.leaks_since(most) for each in samples[-max(1, quarter) :]), key=len)


async def soak(minutes: float, interval_s: float, seed: int) -> tuple[dict[str, Figure], list[str]]:
    """Run a soak; return its figures and its problems."""
    rng = random.Random(seed)
    site = SingleServer(rng)
    run = Soak(site, rng, interval_s)
    try:
        await site.start()
        started = time.monotonic()
        try:
            await run.run(60 * minutes)
        except (QuireError, TimeoutError) as error:
            run.problems.append(f"the server did not recover: {error!r}")
        minutes = (time.monotonic() - started) / 60
        problems = [*run.problems, *growth_of(run.samples)]
    finally:
        left = await site.close()
    first, last = run.samples[len(run.samples) // 4], run.samples[-1]
    figures = {
        "soak.requests": Figure(run.num_requests, "requests", f"in {minutes:.0f} min"),
        "soak.faults": Figure(run.num_faults, "faults"),
        "soak.problems": Figure(len(problems) + len(left), "problems"),
    }
    for name, unit in (
        ("num_bytes", "bytes"),
        ("num_threads", "threads"),
        ("num_descriptors", "descriptors"),
    ):
        for when, sample in (("early", first), ("late", last)):
            figures[f"soak.{when}.{name}"] = Figure(
                getattr(sample, name), unit, "of the gateway and the scheduler"
            )
    return figures, [*problems, *left]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--interval-s", type=float, default=60.0, help="between two faults")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    figures, problems = asyncio.run(soak(arguments.minutes, arguments.interval_s, arguments.seed))
    for problem in problems:
        print(problem)
    print_figures(figures, arguments.json)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
