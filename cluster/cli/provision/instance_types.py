"""Instance types: the checked-in list of cloud machine types with their CPUs, memory and GPUs."""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class InstanceType:
    """A provider's machine type.

    Attributes:
        memory: GiB.
        gpu: the GPU's name; empty for a machine without GPUs.
        gpu_memory: GiB of one GPU.
    """

    provider: str
    name: str
    cpus: int
    memory: int
    gpus: int
    gpu: str
    gpu_memory: int

    @property
    def gpu_summary(self) -> str:
        """For example ``8 x H100 80 GiB``; ``none`` for a machine without GPUs."""
        return f"{self.gpus} x {self.gpu} {self.gpu_memory} GiB" if self.gpus else "none"


@functools.cache
def instance_types() -> Mapping[tuple[str, str], InstanceType]:
    """Return (provider, name) |-> its entry in the checked-in list."""
    text = files(__package__).joinpath("instance_types.csv").read_text()
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    types = [
        InstanceType(
            provider=row["provider"],
            name=row["name"],
            cpus=int(row["cpus"]),
            memory=int(row["memory"]),
            gpus=int(row["gpus"]),
            gpu=row["gpu"],
            gpu_memory=int(row["gpu_memory"] or 0),
        )
        for row in rows
    ]
    return {(known.provider, known.name): known for known in types}
