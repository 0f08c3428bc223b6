"""Certificates that openssl makes: an authority, and pairs of certificate and key that it has signed."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from deadlines import PROGRAM_TIMEOUT_S

HAS_OPENSSL = shutil.which("openssl") is not None


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, PEM files.

    Attributes:
        both: a file with both.
    """

    cert: Path
    key: Path
    both: Path


def make_authority(folder: Path, name: str) -> Pair:
    return _make(folder, name, [])


def make_certificate(folder: Path, name: str, authority: Pair) -> Pair:
    """Make a certificate for 127.0.0.1 with the name as its subject."""
    signed_by = ["-CA", str(authority.cert), "-CAkey", str(authority.key)]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=CA:FALSE"]
    return _make(folder, name, signed_by + names)


def _make(folder: Path, name: str, arguments: list[str]) -> Pair:
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key", folder / f"{name}.both")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    files = ["-subj", f"/CN={name}", "-keyout", str(pair.key), "-out", str(pair.cert)]
    subprocess.run([*command, *files, *arguments], check=True, capture_output=True, timeout=PROGRAM_TIMEOUT_S)
    pair.both.write_bytes(pair.cert.read_bytes() + pair.key.read_bytes())
    return pair
