"""`quire compile`."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...proto.errors import ConfigError
from ..config.engine_options import EngineOptions
from .deploy import read_deployments
from .exit_status import FAILED
from .option_groups import with_options

if TYPE_CHECKING:
    from ...proto.config import EngineConfig

# GPU |-> compute capability times 10.
CAPABILITIES = {
    "a100-40": 80,
    "a100": 80,
    "a10": 86,
    "a6000": 86,
    "l4": 89,
    "l40s": 89,
    "rtx4090": 89,
    "h100": 90,
    "h100-nvl": 90,
    "gh200": 90,
    "h200": 90,
    "b200": 100,
}
# Where Triton keeps compiled kernels.
CACHE_VARIABLE = "TRITON_CACHE_DIR"


@with_options(engine=(EngineOptions,))
def compile_kernels(
    model: Annotated[str, typer.Argument(help="A model directory, or ORG/NAME on the Hugging Face Hub.")],
    engine: dict[str, Any],
    gpu: Annotated[str, typer.Option(help=f"The GPU: {', '.join(CAPABILITIES)}.")] = "h100",
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            help=f"Directory of compiled kernels; ranks use it if their {CACHE_VARIABLE} names it. "
            "Default: that variable, or Triton's own."
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Kernels compiled at a time. Default: the number of cores.", min=1)
    ] = None,
) -> None:
    """Compile the kernels of an engine ahead of time, on a machine without a GPU.

    The options are those of `quire serve`, and must be the same ones. Ranks load a compiled kernel in 10 to 50 ms
    instead of compiling it in 1.5 to 4 s. The compiled kernels are of this version of quire and of Triton.

    Example: `quire compile Qwen/Qwen3-8B --gpu h200 --tensor-parallel-size 2 --cache-dir /opt/kernels`
    """
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    from ...worker import compile_variants, record_variants
    from ..config.machine import gpu_bytes

    if gpu not in CAPABILITIES:
        raise ConfigError(f"--gpu is {gpu!r}, must be one of {', '.join(CAPABILITIES)}")
    capability, memory = CAPABILITIES[gpu], gpu_bytes(gpu)
    (deployment,) = read_deployments(model, engine)
    config = engine_of_gpu(deployment.engine, memory)
    if cache_dir is not None:
        cache_dir.mkdir(parents=True, exist_ok=True)
        os.environ[CACHE_VARIABLE] = str(cache_dir)
    started = time.monotonic()
    size = config.parallel.tensor_parallel_size
    # Of the ranks, the first one alone samples tokens for the host, and the last one may hold less.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as recorder:
        variants = recorder.submit(
            record_variants, config, sorted({0, size - 1}), capability, memory
        ).result()
    recorded = time.monotonic()
    print(f"{len(variants)} kernel variants in {recorded - started:.1f} s", file=sys.stderr)
    problems = []
    num_processes = min(processes or len(os.sched_getaffinity(0)), max(1, len(variants)))
    for _, problem in compile_variants(variants, capability, num_processes):
        if problem is not None:
            problems.append(problem)
    for problem in problems:
        print(problem, file=sys.stderr)
    seconds = time.monotonic() - recorded
    print(f"compiled {len(variants) - len(problems)} in {seconds:.1f} s by {num_processes} processes")
    if problems:
        raise typer.Exit(FAILED)


def engine_of_gpu(options: EngineOptions, memory: int) -> "EngineConfig":
    """Return the engine on GPUs with so many bytes, with as many KV blocks as its ranks need to prepare themselves.

    Raises:
        ConfigError: the GPUs or the model do not allow an option.
        ModelLoadError: the directory is not a model that can be served.
    """
    from ...worker import with_few_blocks
    from ..config.machine import Machine
    from ..config.resolve import resolve

    if options.fused_all_reduce:
        raise ConfigError(
            "--fused-all-reduce needs the memory of other GPUs; its kernels compile at the start"
        )
    size = options.num_ranks
    config = resolve(replace(options, device="cuda"), Machine(len(os.sched_getaffinity(0)), size, memory))
    return with_few_blocks(config)
