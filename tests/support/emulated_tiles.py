"""Sets of instructions with emulated tile registers, so that their ops are tested on a processor without them.

This program runs another one with them: `python tests/support/emulated_tiles.py PROGRAM ARGUMENTS`, with
QUIRE_CPU_ISA set to `avx512-emulated-tiles`, for example.
"""

from __future__ import annotations

import runpy
import sys

from quire.kernels.native import instruction_sets
from quire.kernels.native.instruction_sets import ALL_SETS, InstructionSet, processor_features

EMULATED_SETS = tuple(
    InstructionSet(
        f"{each.name}-emulated-tiles", each.machines, each.features, (*each.flags, "-DQUIRE_EMULATES_TILES")
    )
    for each in ALL_SETS
    if each.name in ("avx512", "avx2")
)


def emulated_sets() -> list[str]:
    """Return the names of the emulated sets whose vectors this processor has."""
    return [each.name for each in EMULATED_SETS if each.features <= processor_features()]


if __name__ == "__main__":
    instruction_sets.ALL_SETS = (*ALL_SETS, *EMULATED_SETS)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
