"""`quire plan`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...proto.errors import ConfigError
from ...proto.options.option import select_options
from ...proto.options.sections import CacheOptions, ParallelOptions, SchedulerOptions
from ..config.deployment import ScalingLimits
from ..config.engine_options import EngineOptions
from .exit_status import FAILED
from .option_groups import with_options
from .simulate import JsonFile, KvRate, ModelPath, Speed, TracePath, read_trace, seconds

if TYPE_CHECKING:
    from ..simulation.planner import Candidate

_MOST_ROWS = 24
# Longer problems stand below the table, so that it has 80 columns.
_SHORT_PROBLEM = 11
# Of the fleets that are tried, unless --max-replicas is given.
_MAX_REPLICAS = 16


@with_options(engine=(ParallelOptions, SchedulerOptions, CacheOptions), limits=(ScalingLimits,))
def plan(
    trace: TracePath,
    model: ModelPath,
    engine: dict[str, Any],
    limits: dict[str, Any],
    ttft_p99: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Time to the first token of 99 % of the requests.")
    ] = None,
    itl_p99: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Time from a token to the next, for 99 % of the tokens."),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(help="A device to consider; may be repeated. Default: all that have a price, but cpu."),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON object: device, and dollars per hour. Default: assumptions."),
    ] = None,
    coefficients: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GPU=FILE", help="Measured times of steps, from `quire calibrate`; may be repeated."
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option(metavar="REQUESTS", help="Most requests of the trace.", min=1)
    ] = 2000,
    speed: Speed = 1.0,
    kv_rate: KvRate = 20.0,
    json_file: JsonFile = None,
    svg_file: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draw cost against latency to FILE.")
    ] = None,
) -> None:
    """Find the cheapest GPUs, tensor-parallel size and replicas that serve a trace within latency targets.

    Each candidate is simulated as `quire simulate` does: fleets of a fixed size, with small and large chunks. The
    cheapest one's block size, autoscaling limits and roles are then varied.

    Example: `quire plan azure.csv --model Qwen/Qwen3-8B --ttft-p99 1 --itl-p99 0.05`
    """
    from rich.console import Console

    from ..simulation.planner import Planner
    from ..simulation.run import Targets

    if ttft_p99 is None and itl_p99 is None:
        raise typer.BadParameter("give a target: --ttft-p99, --itl-p99 or both")
    chosen = {"tensor_parallel_size", "block_size", "max_num_batched_tokens"} & engine.keys()
    if chosen:
        raise typer.BadParameter(f"{', '.join(sorted(chosen))}: the planner chooses these")
    read = read_trace(trace, requests, speed)
    console = Console()
    known = _read_prices(prices, gpu)
    with console.status("simulating") as status:
        planner = Planner(
            EngineOptions(model, **select_options(EngineOptions, engine)),
            read,
            Targets(ttft_p99, itl_p99),
            known,
            ScalingLimits(**({"max_replicas": _MAX_REPLICAS} | select_options(ScalingLimits, limits))),
            coefficients=_read_coefficients(coefficients or []),
            shares_prefixes=read.shares_prefixes,
            kv_bytes_per_s=1e9 * kv_rate,
            on_candidate=lambda candidate: status.update(f"simulated {_name(candidate)}"),
        )
        best = planner.plan()
    _print(console, planner.tried, best, assumes_prices=prices is None)
    if json_file is not None:
        record = {
            "trace": trace.name,
            "model": model,
            "ttft_p99_s": ttft_p99,
            "itl_p99_s": itl_p99,
            "prices": known,
            "best": None if best is None else best.figures(),
            "tried": [each.figures() for each in planner.tried],
        }
        json_file.write_text(json.dumps(record, indent=1) + "\n")
    if svg_file is not None:
        svg_file.write_text(draw(planner.tried))
    if best is None:
        raise typer.Exit(FAILED)


def _read_prices(path: Path | None, gpus: Sequence[str] | None) -> dict[str, float]:
    """Return the prices of the devices to try. Raises ConfigError if a file cannot be read, or lacks one."""
    from ..simulation.engine import CPU
    from ..simulation.planner import ASSUMED_PRICES, check_prices
    from ..simulation.step_time import find_device

    known: dict[str, Any] = dict(ASSUMED_PRICES)
    if path is not None:
        try:
            known = dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"prices {path} cannot be read: {error}") from error
    checked = check_prices(known)
    for each in gpus or checked:
        find_device(each)
        if each not in checked:
            raise ConfigError(f"prices {path} have none for {each}")
    return {each: checked[each] for each in (gpus or checked) if gpus or each != CPU}


def _read_coefficients(given: Sequence[str]) -> dict[str, Path]:
    found = {}
    for each in given:
        gpu, separator, path = each.partition("=")
        if not separator:
            raise typer.BadParameter(f"--coefficients is {each!r}, must be GPU=FILE")
        found[gpu] = Path(path)
    return found


def _name(candidate: "Candidate") -> str:
    return f"{candidate.replicas} x {candidate.tensor_parallel_size} {candidate.gpu}"


def _print(
    console: Any, tried: "Sequence[Candidate]", best: "Candidate | None", *, assumes_prices: bool
) -> None:
    from rich.markup import escape
    from rich.table import Column, Table

    from ..simulation.planner import cheapest_first

    columns = "replicas x GPUs", "block", "chunk", "$/h", "p99 first", "p99 next"
    table, notes = Table(*(Column(name, no_wrap=True) for name in (*columns, "problem"))), dict[str, int]()
    for each in cheapest_first(tried)[:_MOST_ROWS]:
        is_known = each.run is not None
        latencies = ("", "")
        if each.run is not None:
            summary = each.run.summary
            latencies = seconds(summary.ttft.quantile(0.99)), seconds(summary.itl.quantile(0.99))
        cost = f"{each.cost_per_hour:.2f}" if is_known else ""
        problem = each.problem
        if len(problem) > _SHORT_PROBLEM:  # would wrap into many lines
            problem = f"[{notes.setdefault(problem, len(notes) + 1)}]"
        table.add_row(_name(each), str(each.block_size), str(each.chunk), cost, *latencies, escape(problem))
    console.print(table)
    for problem, number in notes.items():
        console.print(escape(f"[{number}] {problem}"), soft_wrap=True)
    if assumes_prices:
        console.print("Prices are assumed; --prices FILE replaces them.")
    if best is None:
        console.print("No candidate meets the targets.")
        return
    fewest, most = best.limits.min_replicas, best.limits.max_replicas
    replicas = f"--min-replicas {fewest} --max-replicas {most}"
    if best.prefill is not None:
        replicas = f"--decode-replicas {fewest} --prefill-replicas {best.prefill.num_replicas}"
    console.print(
        f"Best: --tensor-parallel-size {best.tensor_parallel_size} --block-size {best.block_size} "
        f"--max-num-batched-tokens {best.chunk} {replicas} on {best.gpu}, ${best.cost_per_hour:.2f} per hour",
        soft_wrap=True,
    )


def draw(tried: "Sequence[Candidate]") -> str:
    """Return an SVG picture of cost against the latency of first tokens: a series per device."""
    from .charts import Series, chart

    simulated = [(each, each.run.summary.ttft.quantile(0.99)) for each in tried if each.run is not None]
    series = []
    for gpu in dict.fromkeys(each.gpu for each, _ in simulated):
        own = [(each, ttft_s) for each, ttft_s in simulated if each.gpu == gpu]
        points = [(ttft_s, each.cost_per_hour) for each, ttft_s in own]
        series.append(Series(gpu, points, is_line=False, labels=[_name(each) for each, _ in own]))
    return chart("Cost against latency", series, "p99 of first tokens, seconds", "dollars per hour")
