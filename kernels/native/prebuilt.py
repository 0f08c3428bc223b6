"""Libraries that a wheel brings, one per instruction set of its machine. `setup.py` builds them; no torch is needed.

A wheel keeps the sources as well: for a processor without a library in it, `build` compiles them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .instruction_sets import Choice
from .sources import FLAGS, sources, sources_digest

FOLDER = Path(__file__).parent / "prebuilt"
_DIGEST_FILE = "sources.sha256"
# The runtime of C++ goes into the library, since that of the user's system may be older than the compiler.
PORTABLE_FLAGS = ("-static-libstdc++", "-static-libgcc", "-s")


def find_prebuilt(chosen: Choice, folder: Path = FOLDER) -> Path | None:
    """Return the library for an instruction set, or None if there is none that was built from these sources."""
    path, digest = folder / f"ops-{chosen}.so", folder / _DIGEST_FILE
    if path.is_file() and digest.is_file() and digest.read_text() == sources_digest():
        return path
    return None


def prebuild(folder: Path, choices: Sequence[Choice], compiler: Sequence[str]) -> None:
    """Build libraries into a folder, in place of what it has.

    Args:
        compiler: command of a C++ compiler for the machine, with further flags.

    Raises:
        subprocess.CalledProcessError: the compiler failed.
        RuntimeError: the sources changed meanwhile; the libraries would not be those of the wheel's sources.
    """
    digest = sources_digest()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number, choice in enumerate(choices, start=1):
        output = folder / f"ops-{choice}.so"
        command = [*compiler, *FLAGS, *choice.flags, *map(str, sources()), "-o", str(output)]
        print(f"compiling {output.name}, {number} of {len(choices)}: 10 to 60 s", file=sys.stderr, flush=True)
        subprocess.run(command, check=True)
    if sources_digest() != digest:
        raise RuntimeError("the C++ sources changed while they were compiled; build the wheel again")
    (folder / _DIGEST_FILE).write_text(digest)
