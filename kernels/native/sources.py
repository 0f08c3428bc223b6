"""Sources of the C++ ops, and the flags that every build of them has. Imports the standard library only."""

from __future__ import annotations

import hashlib
from pathlib import Path

_FOLDER = Path(__file__).parent
# Multiplications and additions are contracted alike by all compilers.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=fast")


def sources() -> list[Path]:
    """Return the files to compile."""
    return sorted(_FOLDER.glob("*.cpp"))


def sources_digest() -> str:
    """Return a digest of the sources, their headers and the flags."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted([*sources(), *_FOLDER.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()
