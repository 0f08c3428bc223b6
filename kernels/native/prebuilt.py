"""Libraries that a wheel brings, one per instruction set of its machine. `setup.py` builds them; no torch is needed.

A wheel keeps the sources as well: for a processor without a library in it, `build` compiles them.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .instruction_sets import Choice, all_choices
from .sources import FLAGS, sources, sources_digest

FOLDER = Path(__file__).parent / "prebuilt"
_DIGEST_FILE = "sources.sha256"
# The runtime of C++ goes into the library, since that of the user's system may be older than the compiler.
_LINK_FLAGS = ("-static-libstdc++", "-static-libgcc", "-s")


def find_prebuilt(chosen: Choice, folder: Path = FOLDER) -> Path | None:
    """Return the library for an instruction set, or None if there is none that was built from these sources."""
    path, digest = folder / f"ops-{chosen}.so", folder / _DIGEST_FILE
    if path.is_file() and digest.is_file() and digest.read_text() == sources_digest():
        return path
    return None


def prebuild(folder: Path, machine: str, compiler: Sequence[str]) -> None:
    """Build the libraries of a machine into a folder, in place of what it has.

    Args:
        machine: as platform.machine() names it; may differ from this one.
        compiler: command of a C++ compiler for that machine.

    Raises:
        subprocess.CalledProcessError: the compiler failed.
        RuntimeError: the sources changed meanwhile; the libraries would not be those of the wheel's sources.
    """
    digest = sources_digest()
    shutil.rmtree(
        folder, ignore_errors=True
    )  # libraries of another machine, if the folder of a build is used again
    folder.mkdir(parents=True)
    for choice in all_choices(machine):
        output = folder / f"ops-{choice}.so"
        command = [*compiler, *FLAGS, *choice.flags, *_LINK_FLAGS, *map(str, sources()), "-o", str(output)]
        print(f"building {output.name} for {machine}", flush=True)
        subprocess.run(command, check=True)
    if sources_digest() != digest:
        raise RuntimeError("the C++ sources changed while they were compiled; build the wheel again")
    (folder / _DIGEST_FILE).write_text(digest)
