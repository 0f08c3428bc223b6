"""Faults under mixed work, with real processes.

    PYTHONPATH=tests/support:. python -m tests.chaos --faults 200 --requests 2000 --seed 1 --json FILE
    PYTHONPATH=tests/support:. python -m tests.chaos --sites fleet --faults 8 --requests 80 --seed 17

Each round starts servers of its own: `quire serve demo` with two ranks (site `single`), or two gateways of a fleet
with two replicas on two Ray nodes (site `fleet`), of which one can be in a network of its own (site `network`).
Requests of all kinds are sent over gRPC and HTTP while processes are killed and stopped, steps fail, the network is
cut and the disk is full. Every answer is compared with that of the undisturbed servers. The number of a failed round
is printed; `--seed` repeats its work and its faults.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import numpy as np
from far_network import NetworkNotPermitted

from benchmarks.common import Figure, make_parser, names_from
from benchmarks.common import report as print_figures

from .run import FAULTS_PER_ROUND, SITES, Report, run_round


def figures_of(report: Report) -> dict[str, Figure]:
    """Return the figures of a run."""
    note = f"of {report.num_faults} faults under {report.tally.num_done + len(report.tally.lost)} requests"
    figures = {
        "chaos.faults": Figure(report.num_faults, "faults"),
        "chaos.requests": Figure(report.tally.num_done, "requests"),
        "chaos.lost": Figure(len(report.tally.lost), "requests", note),
        "chaos.changed": Figure(len(report.tally.changed), "answers"),
        "chaos.leaked": Figure(len(report.leaks), "kinds"),
    }
    for kind, seconds in sorted(report.recovery_s.items()):
        for share in (50, 99):
            figures[f"chaos.recovery_s.{kind}.p{share}"] = Figure(
                float(np.percentile(seconds, share)), "s", f"{len(seconds)} faults"
            )
    return figures


async def run_rounds(
    sites: list[str], num_requests: int, num_faults: int, seed: int, kinds: tuple[str, ...], path: Path | None
) -> Report:
    """Run rounds at the sites in turn until there were so many faults; print problems and figures of each."""
    report, num_rounds = Report(), -(-num_faults // FAULTS_PER_ROUND)
    for number in range(num_rounds):
        site, of_round = sites[number % len(sites)], seed + number
        try:
            outcome = await run_round(
                site,
                of_round,
                -(-num_requests // num_rounds),
                num_faults=min(num_faults, FAULTS_PER_ROUND),
                kinds=kinds,
            )
        except NetworkNotPermitted as error:
            print(f"round {of_round} at {site} is left out: {error}", flush=True)
            continue
        report.add(outcome)
        print(
            f"round {of_round} at {site}: {outcome.num_faults} faults, {len(outcome.problems)} problems",
            flush=True,
        )
        for problem in outcome.problems:
            print(f"  {problem}", flush=True)
        print_figures(figures_of(report), path)
    return report


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--faults", type=int, default=FAULTS_PER_ROUND)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sites", type=names_from(SITES), default=list(SITES), metavar="SITES")
    parser.add_argument(
        "--log", action="store_true", help="write faults, and the servers' logs at the end, to stderr"
    )
    parser.add_argument("--kinds", default="", help="of faults, separated by commas, instead of random ones")
    arguments = parser.parse_args()
    if arguments.log:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        logging.getLogger("httpx").setLevel(logging.WARNING)
    kinds = tuple(filter(None, arguments.kinds.split(",")))
    report = asyncio.run(
        run_rounds(
            arguments.sites, arguments.requests, arguments.faults, arguments.seed, kinds, arguments.json
        )
    )
    if report.failed_seeds:
        print(f"failed: {report.failed_seeds}")
    return bool(report.failed_seeds)


if __name__ == "__main__":
    sys.exit(main())
