"""`quire simulate`."""

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...proto.errors import ConfigError
from ...proto.options.option import select_options
from ...proto.options.sections import CacheOptions, ParallelOptions, SchedulerOptions
from ..config.deployment import ScalingLimits
from ..config.engine_options import EngineOptions
from .option_groups import with_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ..simulation.engine import SimulatedEngine
    from ..simulation.traces import TraceFile

TracePath = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE",
        help="A trace of requests, CSV or JSON lines, also compressed with gzip: Azure's, Mooncake's, BurstGPT's, or "
        "one that `quire serve --record-trace` wrote.",
    ),
]
ModelPath = Annotated[
    str,
    typer.Option(
        "--model", help="ORG/NAME on the Hugging Face Hub, or a model directory; its weights are not needed."
    ),
]
Gpu = Annotated[str, typer.Option(help="The device of a rank: h200, h100, b200, a100, l4 or cpu.")]
CoefficientsFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Measured times of steps, from `quire calibrate`. Default: assumptions."
    ),
]
NumRequests = Annotated[
    int | None, typer.Option(metavar="REQUESTS", help="Most requests of the trace.", min=1)
]
Speed = Annotated[
    float, typer.Option(metavar="FACTOR", help="Requests arrive this many times as fast.", min=1e-6)
]
PrefillReplicas = Annotated[
    int,
    typer.Option(
        metavar="REPLICAS",
        help="Replicas that compute long prompts for the others, which have the decode role.",
        min=0,
    ),
]
MaxPrefillReplicas = Annotated[
    int | None,
    typer.Option(
        metavar="REPLICAS", help="Most of them, by their own demand. Default: as many as the fewest.", min=1
    ),
]
DecodeReplicas = Annotated[
    int | None,
    typer.Option(
        metavar="REPLICAS",
        help="The others, with --prefill-replicas and instead of --min-replicas and --max-replicas.",
        min=1,
    ),
]
MaxDecodeReplicas = Annotated[
    int | None,
    typer.Option(
        metavar="REPLICAS",
        help="Most of these, with --decode-replicas. Default: as many as the fewest.",
        min=1,
    ),
]
KvRate = Annotated[
    float,
    typer.Option(
        metavar="GB/S",
        help="With replicas that compute prompts apart: KV that a rank reads from another per second.",
        min=1e-3,
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures to FILE.")
]


def read_trace(path: Path, requests: int | None, speed: float) -> "TraceFile":
    from ..simulation.traces import TraceFile

    return TraceFile(path, requests, speed)


def read_engine(
    model: str, gpu: str, options: dict[str, Any], coefficients: Path | None
) -> "SimulatedEngine":
    from ..simulation.engine import make_engine

    return make_engine(EngineOptions(model, **select_options(EngineOptions, options)), gpu, coefficients)


@contextmanager
def simulation_progress(what: str) -> "Iterator[Callable[[int], None]]":
    """Show the number of requests that have ended while the block runs; yield the function that is told of it."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.completed:,} requests")
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda num_ended: progress.update(task, completed=num_ended)


@with_options(engine=(ParallelOptions, SchedulerOptions, CacheOptions), limits=(ScalingLimits,))
def simulate(
    trace: TracePath,
    model: ModelPath,
    engine: dict[str, Any],
    limits: dict[str, Any],
    gpu: Gpu = "h100",
    coefficients: CoefficientsFile = None,
    requests: NumRequests = None,
    speed: Speed = 1.0,
    prefill_replicas: PrefillReplicas = 0,
    max_prefill_replicas: MaxPrefillReplicas = None,
    decode_replicas: DecodeReplicas = None,
    max_decode_replicas: MaxDecodeReplicas = None,
    kv_rate: KvRate = 20.0,
    json_file: JsonFile = None,
) -> None:
    """Serve a trace in simulated time, with the scheduler, router and autoscaler of a real fleet.

    Example: `quire simulate azure.csv --model Qwen/Qwen3-8B --gpu h200 --min-replicas 1 --max-replicas 8`
    """
    from rich.console import Console

    from ..simulation.fleet import PrefillRole
    from ..simulation.run import Summary, run_trace

    read = read_trace(trace, requests, speed)
    simulated = read_engine(model, gpu, engine, coefficients)
    bounds = ScalingLimits(**select_options(ScalingLimits, limits))
    roles = {
        "max_prefill_replicas": max_prefill_replicas,
        "decode_replicas": decode_replicas,
        "max_decode_replicas": max_decode_replicas,
    }
    if lone := [name for name, value in roles.items() if value is not None and not prefill_replicas]:
        raise ConfigError(f"{lone[0]} is {roles[lone[0]]}, needs prefill_replicas")
    if decode_replicas is not None:
        most = decode_replicas if max_decode_replicas is None else max_decode_replicas
        bounds = replace(bounds, min_replicas=decode_replicas, max_replicas=most)
    with simulation_progress(f"simulating {trace.name}") as on_progress:
        summary = Summary(on_progress=on_progress)
        run = run_trace(
            simulated,
            read,
            bounds,
            summary=summary,
            shares_prefixes=read.shares_prefixes,
            prefill=PrefillRole(prefill_replicas, 1e9 * kv_rate) if prefill_replicas else None,
            max_prefill_replicas=max_prefill_replicas,
        )
    figures = {"trace": trace.name, **run.figures()}
    console = Console()
    print_figures(console, figures)
    if figures["step_time"].startswith("assumed"):
        console.print(
            f"The time of steps on {gpu} is assumed: data sheet and usual efficiencies, no measurement. `quire "
            "calibrate` measures it.",
            soft_wrap=True,
        )
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


def print_figures(console: Any, figures: "Mapping[str, Any]") -> None:
    """Print latencies and counts of a simulated run as two tables of at most 80 columns."""
    from rich.table import Table

    replicas = f"{figures['min_replicas']} to {figures['max_replicas']}"
    if figures.get("prefill_replicas"):
        replicas += f" decode and {figures['prefill_replicas']} prefill"
    console.print(
        f"{figures['trace']}: {figures['requests']:,} requests in {figures['seconds']:,.0f} s on {replicas} "
        f"replicas of {figures['tensor_parallel_size']} x {figures['gpu']}, {figures['kv_tokens']:,} KV tokens each",
        soft_wrap=True,
    )
    table = Table("latency", "mean", "p50", "p90", "p99", "p99 at 95 %")
    for name in ("ttft_s", "itl_s", "e2e_s", "wait_s"):
        row = figures[name]
        low, high = row["p99_interval"]
        values = (seconds(row[key]) for key in ("mean", "p50", "p90", "p99"))
        table.add_row(LATENCIES[name], *values, f"{seconds(low)} - {seconds(high)}")
    console.print(table)
    counts = Table("figure", "value", show_header=False)
    rows = {
        "requests per second": f"{figures['requests_per_s']:,.2f}",
        "output tokens per second": f"{figures['output_tokens_per_s']:,.0f}",
        "prompt tokens per second": f"{figures['prompt_tokens_per_s']:,.0f}",
        "prompt tokens found cached": f"{figures['hit_rate']:.1%}",
        **(
            {"prompts computed apart": f"{figures['split_requests']:,}"}
            if figures.get("prefill_replicas")
            else {}
        ),
        "preemptions": f"{figures['preemptions']:,}",
        "most replicas": f"{figures['most_replicas']}",
        "GPU-hours": f"{figures['gpu_hours']:,.2f}",
        **{f"failed: {kind}": f"{number:,}" for kind, number in figures["errors"].items()},
    }
    for name, value in rows.items():
        counts.add_row(name, value)
    console.print(counts)


LATENCIES = {
    "ttft_s": "first token",
    "itl_s": "between tokens",
    "e2e_s": "whole request",
    "wait_s": "wait",
}


def seconds(value: float) -> str:
    """Return a time in words."""
    return f"{value:,.2f} s" if value >= 1 else f"{1e3 * value:,.1f} ms"
