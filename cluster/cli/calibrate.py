"""`quire calibrate`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...proto.options.option import select_options
from ..config.engine_options import EngineOptions
from .option_groups import with_options

if TYPE_CHECKING:
    from rich.console import Console

    from ...scheduler import MeasuredStep


@with_options(engine=(EngineOptions,))
def calibrate(
    model: Annotated[
        str, typer.Argument(help="A model directory, ORG/NAME on the Hugging Face Hub, or `demo`.")
    ],
    engine: dict[str, Any],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Write the coefficients to FILE.")
    ],
    gpu: Annotated[
        str, typer.Option(help="The device of this machine: h200, h100, b200, a100, l4 or cpu.")
    ] = "cpu",
    steps: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Fit to the steps that `quire serve --record-steps` recorded, instead of running an engine; may be "
            "repeated.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Runs of all probes.", min=1)] = 2,
) -> None:
    """Fit the time of a step to measured ones, for `quire simulate --coefficients`.

    Without `--steps` an engine runs prompts and outputs of many lengths on this machine, alone and mixed, which takes
    a minute or more; nothing else should run meanwhile. With `--steps` the steps are those of a server.

    Examples: `quire calibrate demo --gpu cpu --output cpu.json`,
    `quire calibrate demo --gpu cpu --steps steps/demo-0-1764000000000.jsonl --output cpu.json`
    """
    import numpy as np
    from rich.console import Console

    from ..simulation.calibration import read_recorded_steps
    from ..simulation.engine import make_engine
    from ..simulation.step_time import StepTime, fit_coefficients, relative_errors, write_coefficients

    options = EngineOptions(model, **select_options(EngineOptions, engine))
    simulated = make_engine(options, gpu)
    assumed = simulated.step_time
    console = Console()
    measured = read_recorded_steps(steps, simulated.config) if steps else _run(options, repeats, console)
    fitted = fit_coefficients(assumed, measured)
    errors = np.abs(relative_errors(StepTime(assumed.cost, assumed.device, fitted), measured))
    facts = {
        "model": simulated.config.model.name,
        "date": time.strftime("%Y-%m-%d"),
        "steps": len(measured),
        "median_error": float(np.median(errors)),
        "p90_error": float(np.quantile(errors, 0.9)),
    }
    write_coefficients(output, gpu, fitted, facts)
    console.print(
        f"{len(measured)} steps, fitted with a median error of {facts['median_error']:.1%} and a 90th percentile of "
        f"{facts['p90_error']:.1%}; written to {output}",
        soft_wrap=True,
    )


def _run(options: EngineOptions, repeats: int, console: "Console") -> "list[MeasuredStep]":
    """Return the steps of probes and mixed sequences on an engine of this machine."""
    from ..config.machine import Machine
    from ..config.resolve import resolve
    from ..offline.cluster_engine import open_ranks
    from ..simulation.calibration import Probe, measure_steps

    with console.status("loading") as status:

        def on_probe(probe: Probe) -> None:
            status.update(f"{probe.num_sequences} sequences, prompts of {probe.num_prompt_tokens} tokens")

        with open_ranks(resolve(options, Machine.this())) as (config, ranks):
            return measure_steps(config, ranks, repeats, on_probe=on_probe)
