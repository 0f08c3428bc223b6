"""The C++ ops of the CPU, built once on this machine by its own compiler and called through ctypes.

The first use builds them (about 8 seconds) and keeps the library in the user's cache directory under a name that
holds everything that it depends on: sources, flags, compiler and processor. Without a compiler, or where the build
fails, everything runs on the PyTorch twins, and one line of the log says so.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BUILD_TIMEOUT_S = 300

_SOURCES = Path(__file__).parent
# Linked against the OpenMP that torch has loaded (the soname is the same), so that both share one team of threads.
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp")
_COMPILERS = ("c++", "g++", "clang++")

_log = logging.getLogger(__name__)


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The compiled ops, built if need be; None where they cannot be built."""
    try:
        return ctypes.CDLL(str(_built(_find_compiler())))
    except subprocess.CalledProcessError as error:
        reason = f"{error.cmd[0]} failed: {error.stderr.strip()[-500:]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    _log.warning("CPU ops run on PyTorch alone, which is slower: %s", reason)
    return None


def cache_directory() -> Path:
    """Where the library is kept: QUIRE_CACHE_DIR, else ``quire`` under XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("QUIRE_CACHE_DIR")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"


def _find_compiler() -> str:
    wanted = os.environ.get("CXX")
    for found in map(shutil.which, (wanted,) if wanted else _COMPILERS):
        if found:
            return found
    raise FileNotFoundError(f"no C++ compiler (CXX, or one of {', '.join(_COMPILERS)})")


def _built(compiler: str) -> Path:
    """The library's path; other processes that want the same one wait for the first."""
    flags = (*_FLAGS, "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native")
    folder = cache_directory()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"ops-{_fingerprint(compiler, flags)}.so"
    if not path.exists():
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                _build(compiler, flags, path)
    return path


def _build(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    sources = sorted(str(source) for source in _SOURCES.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built = Path(scratch) / path.name
        command = [compiler, *flags, *sources, "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
        built.replace(path)


def _fingerprint(compiler: str, flags: tuple[str, ...]) -> str:
    version = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
    )
    digest = hashlib.sha256()
    for part in (version.stdout.encode(), " ".join(flags).encode(), _processor()):
        digest.update(len(part).to_bytes(8) + part)
    for source in sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:32]


def _processor() -> bytes:
    """What ``native`` stands for: a cache directory may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    wanted = (b"model name", b"flags", b"Features", b"CPU part")
    return b"\n".join(sorted({line for line in lines if line.startswith(wanted)}))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock file. The wait ends with the holder's build, which has a timeout, or with the holder."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
