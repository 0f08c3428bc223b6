"""The library of C++ ops: the one that the wheel brings, else built with this machine's compiler on first use.

There is one library per instruction set (instruction_sets.py), which takes 10 to 60 seconds to build. It is kept in
the user's cache directory, under a name with a digest of its sources, flags and compiler. Without a compiler, or if
the build fails, all ops run on the PyTorch references, and a warning is logged.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .compiler import run_compiler
from .instruction_sets import Choice, instruction_set, without_tiles
from .prebuilt import find_prebuilt
from .sources import FLAGS, sources, sources_digest

_VERSION_TIMEOUT_S = 300

_COMPILERS = ("c++", "g++", "clang++")

_log = logging.getLogger(__name__)


def build_library() -> None:
    """Build the library if there is none, without loading it. A failure is left for `load_library` to report.

    Processes that wait for each other with deadlines call it before: on a busy machine a compiler takes minutes.

    Raises:
        ValueError: as `load_library` does.
    """
    for choice in (instruction_set(), without_tiles()):
        if choice is not None:
            with suppress(OSError, subprocess.SubprocessError):
                _find_or_build(choice)
                return


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Load the library, building it if necessary. Returns None, and logs a warning, if it cannot be built.

    Raises:
        ValueError: QUIRE_CPU_ISA names an instruction set that does not exist or that the processor lacks.
    """
    chosen, reason = instruction_set(), ""
    for choice in (chosen, without_tiles()):
        if choice is None:
            continue
        try:
            library = ctypes.CDLL(str(_find_or_build(choice)))
        except subprocess.CalledProcessError as error:
            reason = f"{error.cmd[0]} failed: {error.stderr.strip()[-500:]}"
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = str(error)
        else:
            if reason:
                _log.warning("C++ ops use %s instead of %s, which is slower: %s", choice, chosen, reason)
            _log.info("C++ ops use the instruction set %s", choice)
            return library
    _log.warning("C++ ops are not available, PyTorch computes instead, which is slower: %s", reason)
    return None


@dataclass(frozen=True, slots=True)
class LibraryState:
    """State of the library for this machine, without loading it.

    Attributes:
        instruction_set: that the library is, or would be, built for.
        path: of the library; None if it is not built yet.
        is_prebuilt: the wheel brought it.
        problem: why it cannot be built; empty if it can or is.
    """

    instruction_set: str
    path: Path | None = None
    is_prebuilt: bool = False
    problem: str = ""


def library_state() -> LibraryState:
    """Return the state of the library. Raises ValueError as `load_library` does."""
    chosen = instruction_set()
    if (path := find_prebuilt(chosen)) is not None:
        return LibraryState(str(chosen), path, is_prebuilt=True)
    try:
        path = _library_path(_find_compiler(), chosen)
    except (OSError, subprocess.SubprocessError) as error:
        return LibraryState(str(chosen), problem=str(error))
    return LibraryState(str(chosen), path if path.exists() else None)


def cache_directory() -> Path:
    """Return the directory of the library: QUIRE_CACHE_DIR, or ``quire`` under XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("QUIRE_CACHE_DIR")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"


def _find_compiler() -> str:
    configured = os.environ.get("CXX")
    for found in map(shutil.which, (configured,) if configured else _COMPILERS):
        if found:
            return found
    raise FileNotFoundError(f"no C++ compiler (CXX, or one of {', '.join(_COMPILERS)})")


def _find_or_build(choice: Choice) -> Path:
    return find_prebuilt(choice) or _ensure_built(_find_compiler(), choice)


def _ensure_built(compiler: str, chosen: Choice) -> Path:
    """Return the path of the library. Only one process builds it; the others wait."""
    flags = (*FLAGS, *chosen.flags)
    path = _library_path(compiler, chosen)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                # A warning, so that a program that does not configure logging shows why its start takes long.
                _log.warning("compiling the C++ ops for %s, once on this machine: 10 to 60 s", chosen)
                _build(compiler, flags, path)
    return path


def _library_path(compiler: str, chosen: Choice) -> Path:
    return cache_directory() / f"ops-{chosen}-{_fingerprint(compiler, (*FLAGS, *chosen.flags))}.so"


def _build(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built = Path(scratch) / path.name
        command = [compiler, *flags, *map(str, sources()), "-o", str(built)]
        run_compiler(command)
        built.replace(path)


def _fingerprint(compiler: str, flags: tuple[str, ...]) -> str:
    version = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S
    )
    digest = hashlib.sha256()
    for part in (version.stdout, " ".join(flags), sources_digest()):
        digest.update(len(part.encode()).to_bytes(8) + part.encode())
    return digest.hexdigest()[:32]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file. The wait ends when the holder's build ends, which has limits, or when the holder exits."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("waiting for another process, which compiles the C++ ops")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
