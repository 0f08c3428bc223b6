"""The machine types that quire knows, and what they offer."""

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
        gpu: the GPU's name; empty for a machine without.
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
    def gpus_in_words(self) -> str:
        return f"{self.gpus} x {self.gpu} {self.gpu_memory} GiB" if self.gpus else "none"


@functools.cache
def instance_types() -> Mapping[tuple[str, str], InstanceType]:
    """(provider, name) |-> what the checked-in list says of it."""
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
