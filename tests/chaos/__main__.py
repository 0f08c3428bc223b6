"""Faults under mixed work, with real processes.

    PYTHONPATH=tests/support:. python -m tests.chaos --faults 20 --requests 400 --seed 1 --json FILE

Starts `quire serve demo` with two ranks, sends requests of all kinds over gRPC and HTTP, kills and stops its
processes meanwhile, and compares every answer with that of the undisturbed server. The faults and the work are those
of the seed; their coincidence in time is not.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from benchmarks.common import Figure, make_parser, names_from
from benchmarks.common import report as print_figures

from .faults import FAULTS
from .run import Report, run


def figures_of(report: Report) -> dict[str, Figure]:
    """Return the figures of a run."""
    note = f"of {report.num_faults} faults under {report.tally.num_done + len(report.tally.lost)} requests"
    figures = {
        "chaos.lost": Figure(len(report.tally.lost), "requests", note),
        "chaos.changed": Figure(len(report.tally.changed), "answers"),
        "chaos.leaked": Figure(len(report.leaks), "kinds"),
    }
    for kind, seconds in report.recovery_s.items():
        for share in (50, 99):
            figures[f"chaos.recovery_s.{kind}.p{share}"] = Figure(
                float(np.percentile(seconds, share)), "s", f"{len(seconds)} faults"
            )
    return figures


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--faults", type=int, default=12)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", type=names_from(FAULTS), default=list(FAULTS), metavar="KINDS")
    arguments = parser.parse_args()
    outcome = asyncio.run(run(arguments.requests, arguments.faults, arguments.seed, tuple(arguments.kinds)))
    for line in (*outcome.tally.lost, *outcome.tally.changed, *outcome.leaks):
        print(line)
    print_figures(figures_of(outcome), arguments.json)
    return bool(outcome.tally.lost or outcome.tally.changed or outcome.leaks)


if __name__ == "__main__":
    sys.exit(main())
