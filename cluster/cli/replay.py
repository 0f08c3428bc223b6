"""`quire replay`."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...proto.errors import ConfigError
from ...proto.options.option import check_names, declared_options, read_environment, select_options
from ...proto.options.sections import CacheOptions, ParallelOptions, SchedulerOptions
from ..config.deployment import ScalingLimits
from .option_groups import with_options
from .simulate import (
    CoefficientsFile,
    Gpu,
    JsonFile,
    ModelPath,
    NumRequests,
    Speed,
    TracePath,
    read_engine,
    read_trace,
    seconds,
    simulation_progress,
)

if TYPE_CHECKING:
    from ..simulation.recorded import RecordedLatencies

_OWNERS = (ParallelOptions, SchedulerOptions, CacheOptions, ScalingLimits)
_ROWS = {
    "first token, p50": ("ttft_s", "p50"),
    "first token, p99": ("ttft_s", "p99"),
    "between tokens, p50": ("itl_s", "p50"),
    "between tokens, p99": ("itl_s", "p99"),
    "whole request, p50": ("e2e_s", "p50"),
    "whole request, p99": ("e2e_s", "p99"),
}
_COUNTS = {
    "requests per second": "requests_per_s",
    "prompt tokens found cached": "hit_rate",
    "preemptions": "preemptions",
    "GPU-hours": "gpu_hours",
}


@with_options(engine=(ParallelOptions, SchedulerOptions, CacheOptions), limits=(ScalingLimits,))
def replay(
    trace: TracePath,
    model: ModelPath,
    engine: dict[str, Any],
    limits: dict[str, Any],
    change: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=VALUE",
            help="An option's other value, for example max_num_seqs=64; may be repeated.",
        ),
    ],
    gpu: Gpu = "h100",
    coefficients: CoefficientsFile = None,
    requests: NumRequests = None,
    speed: Speed = 1.0,
    json_file: JsonFile = None,
) -> None:
    """Replay a recorded trace twice in simulated time, as it was served and with changes; show the differences.

    `quire serve --record-trace FILE` records one. The options below are those that it was served with.

    Example: `quire replay day.jsonl --model Qwen/Qwen3-8B --gpu h100 --change max_num_batched_tokens=2048`
    """
    from rich.console import Console

    from ..simulation.recorded import read_latencies
    from ..simulation.run import Summary, run_trace

    read = read_trace(trace, requests, speed)
    changes = _read_changes(change)
    runs = []
    for name, changed in (("as served", {}), ("changed", changes)):
        simulated = read_engine(model, gpu, engine | changed, coefficients)
        bounds = ScalingLimits(**select_options(ScalingLimits, limits | changed))
        with simulation_progress(name) as on_progress:
            summary = Summary(on_progress=on_progress)
            run = run_trace(simulated, read, bounds, summary=summary, shares_prefixes=read.shares_prefixes)
        runs.append(run.figures())
    before, after = runs
    _print(Console(), read_latencies(trace, requests), before, after)
    if json_file is not None:
        record = {"trace": trace.name, "changes": list(change), "as_served": before, "changed": after}
        json_file.write_text(json.dumps(record, indent=1) + "\n")


def _read_changes(given: Sequence[str]) -> dict[str, Any]:
    """Return option |-> value. Raises ConfigError if an option is not known or its value not allowed."""
    options = {name: option for owner in _OWNERS for name, option in declared_options(owner).items()}
    texts = {}
    for each in given:
        name, separator, text = each.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not separator:
            raise ConfigError(f"change is {each!r}, must be NAME=VALUE")
        texts[name] = text
    check_names(texts, "quire replay", options)
    return read_environment({options[name].variable: text for name, text in texts.items()}, *_OWNERS)


def _print(
    console: Any, recorded: "RecordedLatencies", before: Mapping[str, Any], after: Mapping[str, Any]
) -> None:
    from rich.table import Table

    of_trace = {"ttft_s": recorded.ttft.summary(), "e2e_s": recorded.e2e.summary()}
    table = Table("figure", "recorded", "simulated", "changed", "difference")
    for name, (latency, column) in _ROWS.items():
        row = of_trace.get(latency)
        was = seconds(row[column]) if row is not None and row["count"] else ""
        values = before[latency][column], after[latency][column]
        table.add_row(name, was, *map(seconds, values), _difference(*values))
    for name, key in _COUNTS.items():
        table.add_row(
            name, "", f"{before[key]:,.3g}", f"{after[key]:,.3g}", _difference(before[key], after[key])
        )
    console.print(table)


def _difference(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else ""
