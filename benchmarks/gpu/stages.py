"""The stages, the most valuable first, and the program that runs one of them: `python -m benchmarks.gpu.stages`."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.record import DeviceLost, Record
from benchmarks.gpu.sizes import SIZES

# Before the limit, at which the parent kills a stage, its threads' stacks are printed.
STACKS_BEFORE_S = 3.0
# Exit status of a stage that another process is to continue.
LOST_DEVICE = 3


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage, the module of the same name in this package.

    Attributes:
        limit_s: seconds that it may take at most.
    """

    name: str
    limit_s: float


STAGES = (
    Stage("environment", 40),
    Stage("tokens", 100),
    Stage("smoke", 150),
    Stage("again", 100),
    Stage("engine", 220),
    Stage("kernels", 120),
    Stage("collectives", 30),
    Stage("ranks", 60),
    Stage("reference", 90),
    Stage("variants", 130),
    Stage("adapters", 50),
    Stage("latents", 60),
    Stage("slices", 130),
    Stage("drafts", 70),
    Stage("embeddings", 30),
    Stage("checks", 140),
)
# A visit to a GPU in three commands of at most nine minutes: is it right, is it fast, and what would be faster.
PARTS = {
    "right": ("environment", "tokens", "smoke", "again", "checks"),
    "speed": ("environment", "engine", "reference", "variants", "latents"),
    "kernels": (
        "environment",
        "kernels",
        "slices",
        "collectives",
        "ranks",
        "adapters",
        "drafts",
        "embeddings",
    ),
}
PART_S = 540.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=[stage.name for stage in STAGES])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--device", choices=SIZES, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--resume", action="store_true", help="without the cases that were begun")
    arguments = parser.parse_args()
    faulthandler.enable()
    if arguments.seconds > STACKS_BEFORE_S:
        faulthandler.dump_traceback_later(arguments.seconds - STACKS_BEFORE_S)
    record = Record(
        arguments.out,
        arguments.stage,
        time.monotonic() + arguments.seconds,
        _device_name(arguments.device),
        resumes=arguments.resume,
    )
    try:
        with record.case(arguments.stage):
            module = importlib.import_module(f"benchmarks.gpu.{arguments.stage}")
            module.run(record, arguments.out, arguments.work, SIZES[arguments.device])
    except DeviceLost:
        # Without the destructors, which would use the device.
        os._exit(LOST_DEVICE)
    record.write("done")
    sys.exit(1 if record.problems else 0)


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "CPU (dry run)"


if __name__ == "__main__":
    main()
