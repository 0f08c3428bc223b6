"""`quire calibrate`."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ...proto.options.option import select_options
from ..config.engine_options import EngineOptions
from .option_groups import with_options


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
    repeats: Annotated[int, typer.Option(help="Runs of all probes.", min=1)] = 2,
) -> None:
    """Measure the steps of an engine on this machine, for `quire simulate --coefficients`.

    The engine runs prompts and outputs of many lengths, alone and mixed. The time of a step is fitted to what it
    reads, multiplies and sends. Takes a minute or more; nothing else should run meanwhile.

    Example: `quire calibrate demo --gpu cpu --output cpu.json`
    """
    import numpy as np
    from rich.console import Console

    from ..config.machine import Machine
    from ..config.resolve import resolve
    from ..offline.cluster_engine import open_ranks
    from ..simulation.calibration import Probe, measure_steps
    from ..simulation.engine import make_engine
    from ..simulation.step_time import StepTime, fit_coefficients, relative_errors, write_coefficients

    options = EngineOptions(model, **select_options(EngineOptions, engine))
    assumed = make_engine(options, gpu).step_time
    console = Console()
    with console.status("loading") as status:

        def on_probe(probe: Probe) -> None:
            status.update(f"{probe.num_sequences} sequences, prompts of {probe.num_prompt_tokens} tokens")

        with open_ranks(resolve(options, Machine.this())) as (config, ranks):
            steps = measure_steps(config, ranks, repeats, on_probe=on_probe)
    fitted = fit_coefficients(assumed, steps)
    errors = np.abs(relative_errors(StepTime(assumed.cost, assumed.device, fitted), steps))
    facts = {
        "model": config.model.name,
        "date": time.strftime("%Y-%m-%d"),
        "steps": len(steps),
        "median_error": float(np.median(errors)),
        "p90_error": float(np.quantile(errors, 0.9)),
    }
    write_coefficients(output, gpu, fitted, facts)
    console.print(
        f"{len(steps)} steps, fitted with a median error of {facts['median_error']:.1%} and a 90th percentile of "
        f"{facts['p90_error']:.1%}; written to {output}",
        soft_wrap=True,
    )
