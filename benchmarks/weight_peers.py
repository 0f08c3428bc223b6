"""Seconds in which a rank on a CPU gets its weights: from files, and from the process of another replica's rank.

    python -m benchmarks.weight_peers --json benchmarks/results/weight_peers.json

Each load is in a process of its own, after its imports. `files_cold` has dropped the files from the page cache, and
`mapped` shares the memory of a process on the same host, and `copied` copies it over an encrypted connection through
the loopback interface, which other hosts would use.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks.common import Figure, make_parser, median, report
from benchmarks.random_models import make_model

# Connections that the owner accepts.
NUM_COPIES = 32
KINDS = "files_cold", "files_warm", "mapped", "copied"


def load(folder: str, report_of_owner: str) -> None:
    """Load the weights, from the process of a report if it is not empty, and print the seconds."""
    from quire.cluster.config.engine_options import EngineOptions
    from quire.cluster.config.machine import Machine
    from quire.cluster.config.resolve import resolve
    from quire.worker.comm.communicator import SingleRank
    from quire.worker.memory.shared_segment import SegmentAddress
    from quire.worker.rank.runner import ModelRunner
    from quire.worker.rank.weight_peers import WeightServer
    from quire.worker.weights.weight_source import WeightSource

    options = EngineOptions(
        folder, device="cpu", dtype="bfloat16", num_kv_blocks=16, max_model_len=256, weights_from_peers=True
    )
    config = resolve(options, Machine.this())
    sources = []
    if report_of_owner:
        own = json.loads(report_of_owner)
        addresses = tuple(SegmentAddress(**each) for each in own["segments"])
        pairs = [(bytes.fromhex(token), bytes.fromhex(key)) for token, key in own["credentials"]]
        sources = [WeightSource("the owner", addresses, "127.0.0.1", own["port"], tuple(pairs))]
    started = time.perf_counter()
    runner = ModelRunner(config, SingleRank(), inherited=sources)
    seconds = time.perf_counter() - started
    server = WeightServer("the owner")
    offered = [server.source(runner.weight_segments, "127.0.0.1") for _ in range(NUM_COPIES)]
    own = asdict(offered[0])
    own["credentials"] = [[each.hex() for each in source.credentials[0]] for source in offered]
    print(json.dumps({"seconds": seconds, "source": own}), flush=True)
    if not report_of_owner:
        sys.stdin.read()  # until the parent process closes it


@contextmanager
def loaded(folder: str, source: dict[str, object] | None) -> Iterator[dict[str, object]]:
    """Load in a process of its own, which lives as long as the body; yield its report."""
    command = [sys.executable, "-m", "benchmarks.weight_peers", "--load", folder, json.dumps(source or "")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        watchdog = threading.Timer(300.0, process.kill)
        watchdog.start()
        line = process.stdout.readline()
        watchdog.cancel()
        yield json.loads(line)
        process.stdin.close()


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=("s", "m"), default="m", help="shape: m is Qwen2.5-0.5B's")
    parser.add_argument("--repeats", type=int, default=3, help="loads of each kind, whose median counts")
    parser.add_argument("--load", nargs=2, metavar=("DIR", "SOURCE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load is not None:
        folder, source = arguments.load
        load(folder, "" if source == '""' else source)
        return
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), arguments.model)
        with loaded(folder, None) as owner:
            source = owner["source"]
            assert isinstance(source, dict)
            for _ in range(arguments.repeats):
                for kind in KINDS:
                    if kind == "files_cold":
                        drop_from_page_cache(Path(folder))
                    segments = [] if kind == "copied" else source["segments"]
                    own = source | {"segments": segments}
                    with loaded(folder, None if kind.startswith("files") else own) as measured:
                        value = measured["seconds"]
                        assert isinstance(value, float)
                        seconds[kind].append(value)
                    if kind == "copied":
                        source["credentials"].pop(0)
        num_bytes = sum(each["num_bytes"] for each in source["segments"])
    figures = {"weight_peers.gb": Figure(num_bytes / 1e9, "GB")}
    figures |= {
        f"weight_peers.{kind}_s": Figure(median(seconds[kind]), "s") for kind in KINDS if seconds[kind]
    }
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
