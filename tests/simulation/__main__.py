"""Run seeds of the simulation.

PYTHONPATH=tests/support python -m tests.simulation --seeds 0-9999
PYTHONPATH=tests/support python -m tests.simulation --seeds 4711 --log
PYTHONPATH=tests/support python -m tests.simulation --seeds 4711 --events FILE
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

from .scenario import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0-199", metavar="N[-M]")
    parser.add_argument("--log", action="store_true", help="write the log of the fleet to stderr")
    parser.add_argument(
        "--events", type=Path, help="a file for the events, to be compared with another run's"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO if arguments.log else logging.CRITICAL)
    first, _, last = arguments.seeds.partition("-")
    faults, outcomes, reads = Counter[str](), Counter[str](), Counter[str]()
    failed, started = list[int](), time.process_time()
    seeds = range(int(first), int(last or first) + 1)
    with nullcontext() if arguments.events is None else arguments.events.open("w") as events:
        for seed in seeds:
            try:
                outcome = run_seed(seed, None if events is None else events.write)
            except Exception:
                failed.append(seed)
                print(f"seed {seed} failed:\n{traceback.format_exc(limit=-3)}")
                continue
            faults += outcome.faults
            outcomes += outcome.outcomes
            reads += outcome.reads
    seconds = time.process_time() - started
    print(
        f"{len(seeds)} seeds in {seconds:.1f} s of processor time: {dict(faults)}, {dict(outcomes)}, {dict(reads)}"
    )
    print(f"{len(failed)} failed: {failed}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
