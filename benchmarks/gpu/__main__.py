"""Check and measure quire on a GPU, in three commands of at most nine minutes each, with the same DIR.

Stages run one after the other, each in a process of its own with a time limit, the most valuable first.
DIR/result.json is complete after every case, whatever ends the run; failures are in it with their stack traces. A
stage whose process crashes, or loses its GPU by an error, goes on in another one with the next case. The file keeps
stages of earlier runs. Exits with 1 if anything failed.

    python -m benchmarks.gpu --out DIR --part right      # greedy tokens and each kernel beside a reference, gpu tests
    python -m benchmarks.gpu --out DIR --part speed      # an engine at real shapes, beside transformers and libraries
    python -m benchmarks.gpu --out DIR --part kernels    # each kernel beside its roof and libraries, and other tiles
    python -m benchmarks.gpu --out DIR --stages smoke,engine
    python -m benchmarks.gpu --out DIR --device cpu      # a dry run without a GPU, with tiny sizes

`python -m benchmarks.figures_page` renders a result that is kept in benchmarks/results/gpu/<device>-<date>/.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
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
from benchmarks.gpu.record import read_results, read_stage, write_stage
from benchmarks.gpu.stages import LOST_DEVICE, PARTS, STAGES, Stage
from benchmarks.gpu.table import NOT_SHOWN, problem_lines, summary

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")
# The 8B model, with room for what else uses the memory.
WORK_BYTES = 40 << 30
# Of the time left, kept for writing the summary.
RESERVE_S = 5.0
# With less, a stage is not started.
LEAST_S = 10.0
# A dry run on a CPU, which others may use too, tests what the stages do and not how long they take.
DRY_PATIENCE = 4
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
    records = read_results(arguments.out)
    unseen = [f"not shown by this visit: {each}" for each in NOT_SHOWN]
    print("\n".join((*summary(records), *problem_lines(records), *unseen)))
    sys.exit(any(record["problems"] or record["status"] != "done" for record in records))


def run_stage(
    stage: Stage, arguments: argparse.Namespace, work: Path, deadline: float, environment: dict[str, str]
) -> str:
    """Run a stage to its end or its limit; return one line about it."""
    started = time.monotonic()
    patience = DRY_PATIENCE if arguments.device == "cpu" else 1
    deadline = min(deadline, started + patience * stage.limit_s)
    record: dict[str, Any] = {"stage": stage.name, "figures": {}, "problems": [], "notes": {}, "begun": []}
    record["status"] = "not run"
    write_stage(arguments.out, record)
    output, num_begun = "", -1
    # A stage is continued only if the last process began a case: the others would fail in the same way again.
    while (limit_s := deadline - time.monotonic()) >= LEAST_S and len(record["begun"]) > num_begun:
        num_begun = len(record["begun"])
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu.stages",
            stage.name,
            "--out",
            str(arguments.out.resolve()),
        ]
        command += ["--work", str(work), "--device", arguments.device, "--seconds", str(limit_s)]
        with tempfile.TemporaryFile("w+") as log:
            status = _run([*command, "--resume"], limit_s, environment, log.fileno())
            log.seek(0)
            output += log.read()
        record = read_stage(arguments.out, stage.name)
        if status == "done" and record["status"] == "done":
            break
        # A stage that ended by itself but not at its end has crashed.
        record["status"] = status if status != "done" else "failed"
        if record["begun"] and status != f"failed with {LOST_DEVICE}":
            last = record["begun"][-1]
            record["problems"].append({"case": last, "error": f"the process {status}", "trace": ""})
        write_stage(arguments.out, record)
    write_stage(arguments.out, record | {"log": output[-_MAX_LOG:]})
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
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--part", choices=list(PARTS), help="the stages of one of the three commands")
    chosen.add_argument(
        "--stages",
        type=names_from(names),
        default=names,
        metavar="NAME,...",
        help=f"of {', '.join(names)} (default: all)",
    )
    arguments = parser.parse_args()
    if arguments.part is not None:
        arguments.stages = PARTS[arguments.part]
    return arguments


if __name__ == "__main__":
    main()
