"""Measure quire on a GPU within a few minutes: `python -m benchmarks.gpu --out DIR --minutes 9`.

Stages run one after the other, each in a process of its own with a time limit, the most valuable first. Each writes
DIR/<stage>.json after every figure; failures are in it with their stack traces. Exits with 1 if anything failed.

    python -m benchmarks.gpu --out DIR --minutes 9
    python -m benchmarks.gpu --out DIR --stages smoke,engine
    python -m benchmarks.gpu --out DIR --device cpu      # a dry run without a GPU, with tiny sizes

`python -m benchmarks.figures_page` renders a result that is kept in benchmarks/results/gpu/<device>-<date>/.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import names_from
from benchmarks.gpu.record import write_json
from benchmarks.gpu.stages import STAGES, Stage
from benchmarks.gpu.table import problem_lines, summary

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")
# The 8B model, with room for what else uses the memory.
WORK_BYTES = 40 << 30
# Of the time left, kept for writing the summary.
RESERVE_S = 5.0
# With less, a stage is not started.
LEAST_S = 10.0
_MAX_LOG = 12000


def main() -> None:
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * arguments.minutes - RESERVE_S
    with tempfile.TemporaryDirectory(dir=_work_parent()) as work:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(_search_path(Path(work)))}
        for stage in STAGES:
            if stage.name in arguments.stages:
                print(run_stage(stage, arguments, Path(work), deadline, environment), flush=True)
    records = [json.loads(path.read_text()) for path in sorted(arguments.out.glob("*.json"))]
    print("\n".join((*summary(records), *problem_lines(records))))
    sys.exit(any(record["problems"] or record["status"] != "done" for record in records))


def run_stage(
    stage: Stage, arguments: argparse.Namespace, work: Path, deadline: float, environment: dict[str, str]
) -> str:
    """Run a stage to its end or its limit; return one line about it."""
    path = arguments.out / f"{stage.name}.json"
    path.unlink(missing_ok=True)
    limit_s = min(stage.limit_s, deadline - time.monotonic())
    if limit_s < LEAST_S:
        _finish(path, stage, "not run", "")
        return f"{stage.name}: not run, no time is left"
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.stages",
        stage.name,
        "--out",
        str(arguments.out.resolve()),
    ]
    command += ["--work", str(work)]
    command += ["--device", arguments.device, "--seconds", str(limit_s)]
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        status = _run(command, limit_s, environment, log.fileno())
        log.seek(0)
        output = log.read()
    record = _finish(path, stage, status, output)
    return (
        f"{stage.name}: {record['status']} in {time.monotonic() - started:.0f} s, {len(record['figures'])} "
        f"figures, {len(record['problems'])} problems"
    )


def _run(command: list[str], limit_s: float, environment: dict[str, str], log: int) -> str:
    """Run a process, and end it with its children at the limit."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        return "done" if process.wait(limit_s) in (0, 1) else f"failed with {process.returncode}"
    except subprocess.TimeoutExpired:
        return f"timed out after {limit_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _finish(path: Path, stage: Stage, status: str, output: str) -> dict[str, Any]:
    """Add the exit status and the end of the output to a stage's record, which may be missing."""
    record: dict[str, Any] = {
        "stage": stage.name,
        "status": "not run",
        "figures": {},
        "problems": [],
        "notes": {},
    }
    if path.exists():
        record |= json.loads(path.read_text())
    # A stage that ended by itself but not at its end has crashed.
    if status != "done" or record["status"] != "done":
        record["status"] = status if status != "done" else "failed"
    record["log"] = output[-_MAX_LOG:]
    write_json(path, record)
    return record


def _work_parent() -> str | None:
    """Return where the model is written: memory, if there is enough, otherwise the folder of temporary files."""
    has_room = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > WORK_BYTES
    return str(SHARED_MEMORY) if has_room else None


def _search_path(links: Path) -> list[str]:
    """Return the folders of PYTHONPATH: the repository is the package `quire`, installed or not."""
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if importlib.util.find_spec("quire") is None:
        (links / "quire").symlink_to(ROOT)
        given.insert(0, str(links))
    return [*given, str(ROOT)]


def parse_arguments() -> argparse.Namespace:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything (default: %(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: dry run, tiny sizes")
    parser.add_argument(
        "--stages",
        type=names_from(names),
        default=names,
        metavar="NAME,...",
        help=f"of {', '.join(names)} (default: all)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
