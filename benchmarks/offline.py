"""Offline inference: throughput and latency of greedy decoding on the workloads of `benchmarks.workloads`.

    python -m benchmarks.offline --json benchmarks/results/offline.json
    python -m benchmarks.offline --peers DIR --json FILE
    python -m benchmarks.offline --peers DIR --tensor-parallel-size 2 --json FILE
    python -m benchmarks.offline --peers DIR --model m --workloads w2,w3,w4 --engines quire,vllm --json FILE
    python -m benchmarks.offline --peers DIR --dtype bfloat16 --engines quire,quire-avx512,vllm --json FILE

w1 and w2 are many requests of mixed lengths, w3 is a single stream, w4 a long prompt, w5 a shared prefix. End-of-text
tokens are ignored. Without --model-dir the run creates a model with random weights: s, a Llama of 60 million
parameters, or m, with the shape of Qwen2.5-0.5B.

With --peers the same run also measures other engines, from the environments that `benchmarks.peers.install` created
in DIR; their logs are in DIR/logs. All engines load the same files, get the same prompts and take turns; the
processes of the others are stopped meanwhile. The figures note an engine that does not finish a workload within
--limit seconds; it is restarted for the next workload. After --minutes nothing more is measured. FILE is written
after every workload. quire-avx512 is quire without the tile registers (AMX) in which newer processors multiply
bfloat16. On two cores all five engines take 15 minutes on s, and each of the other two runs 10 minutes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from benchmarks.common import Figure, make_parser, names_from, report, write_figures
from benchmarks.peers.comparison import Comparison, Limits
from benchmarks.peers.engine import Requests
from benchmarks.peers.process import DEFAULT, MODULES, TENSOR_PARALLEL, Engine
from benchmarks.random_models import MODELS, make_model
from benchmarks.workloads import WORKLOADS, Workload, warm_up
from quire import LLM, SamplingParams

MAX_MODEL_LEN = 2048
LOAD_LIMIT_S = 600.0

Figures = dict[str, Figure]


def measure_llm(arguments: argparse.Namespace, folder: Path) -> Figures:
    """Measure quire alone, in this process."""
    started = time.perf_counter()
    llm = LLM(
        str(folder),
        tensor_parallel_size=arguments.tensor_parallel_size,
        dtype=arguments.dtype,
        max_model_len=MAX_MODEL_LEN,
    )
    with llm:
        figures = {"offline.load_s": Figure(time.perf_counter() - started, "s")}
        time_batch(llm, warm_up())
        for name in arguments.workloads:
            found = repeat(llm, WORKLOADS[name], arguments.repetitions)
            figures |= {f"offline.{name}.{key}": figure for key, figure in found.items()}
    return figures


def repeat(llm: LLM, workload: Workload, repetitions: int) -> Figures:
    walls = [
        [time_batch(llm, batch) for batch in workload.batches(repetition)]
        for repetition in range(workload.num_repetitions(repetitions))
    ]
    return workload.figures(walls)


def time_batch(llm: LLM, requests: Requests) -> float:
    """Return the seconds until all requests have finished."""
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for _, n in requests]
    started = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in requests], params)
    elapsed = time.perf_counter() - started
    assert [len(output.outputs[0].token_ids) for output in outputs] == [n for _, n in requests]
    return elapsed


def measure_peers(arguments: argparse.Namespace, folder: Path, note: str) -> Figures:
    """Measure quire and the other engines, each in its own processes; write the figures after each workload."""
    options = ["--model-dir", str(folder), "--dtype", arguments.dtype, "--threads", str(num_cores())]
    options += ["--tensor-parallel-size", str(arguments.tensor_parallel_size)]

    logs = {name: arguments.peers / "logs" / f"{name}.log" for name in arguments.engines}
    for log in logs.values():
        log.unlink(missing_ok=True)

    def start(name: str, timeout_s: float) -> Engine:
        return Engine(name, arguments.peers, options, logs[name], timeout_s)

    limits = Limits(LOAD_LIMIT_S, arguments.limit, 60 * arguments.minutes)
    print(f"{', '.join(arguments.engines)}: at most {arguments.minutes:g} minutes in all", file=sys.stderr)
    figures: Figures = {}

    def keep(found: Figures) -> None:
        figures.update({f"peers.{name}": with_note(figure, note) for name, figure in found.items()})
        if arguments.json is not None:
            write_figures(arguments.json, figures)

    with Comparison(arguments.engines, start, limits, warm_up()) as comparison:
        keep(comparison.load())
        for name in arguments.workloads:
            keep(comparison.measure(name, WORKLOADS[name], arguments.repetitions))
    return figures


def with_note(figure: Figure, note: str) -> Figure:
    return replace(figure, note=f"{figure.note}; {note}" if figure.note else note)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(arguments: argparse.Namespace, folder: Path) -> None:
    if not (folder / "config.json").exists():
        make_model(folder, arguments.model)
    note = f"model {arguments.model if arguments.model_dir is None else folder.name}, {arguments.dtype}, "
    note += f"{num_cores()} cores, tensor_parallel_size {arguments.tensor_parallel_size}"
    if arguments.peers is not None:
        figures = measure_peers(arguments, folder, note)
    else:
        figures = {name: with_note(f, note) for name, f in measure_llm(arguments, folder).items()}
    report(figures, arguments.json)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="s", help="model to create (default: %(default)s)")
    parser.add_argument(
        "--model-dir", type=Path, help="model directory; the model is created there if it is missing"
    )
    parser.add_argument(
        "--workloads",
        type=names_from(WORKLOADS),
        default="w1,w3,w4,w5",
        metavar="NAME,...",
        help=f"of {', '.join(WORKLOADS)} (default: %(default)s)",
    )
    parser.add_argument("--repetitions", type=int, default=3, help="of each workload (default: %(default)s)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="RANKS")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="also measure the engines installed in DIR")
    parser.add_argument(
        "--engines",
        type=names_from(MODULES),
        metavar="NAME,...",
        help=f"with --peers (default: {','.join(DEFAULT)}; with several ranks: {','.join(TENSOR_PARALLEL)})",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=180.0,
        metavar="SECONDS",
        help="with --peers, per engine and workload (default: %(default)s)",
    )
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="with --peers, for the whole run (default: %(default)s)"
    )
    arguments = parser.parse_args()
    able = MODULES if arguments.tensor_parallel_size == 1 else TENSOR_PARALLEL
    if unable := set(arguments.engines or ()) - set(able):
        parser.error(
            f"--tensor-parallel-size is {arguments.tensor_parallel_size}, but these run on one rank only: "
            f"{', '.join(sorted(unable))}"
        )
    arguments.engines = arguments.engines or [name for name in DEFAULT if name in able]
    return arguments


def _exit(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def main() -> None:
    arguments = parse_arguments()
    # Exit normally, so that temporary files are deleted. Keep SIGHUP ignored if nohup ignores it.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _exit)
    if arguments.model_dir is not None:
        run(arguments, arguments.model_dir)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(arguments, Path(folder) / f"model-{arguments.model}")


if __name__ == "__main__":
    main()
