"""`compat` works with every supported minor version of Ray.

Supported are the versions from pyproject.toml's minimum to constraints.txt's pin.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadlines import PROGRAM_TIMEOUT_S

ROOT = Path(__file__).parents[4]
COMPAT_TESTS = Path(__file__).with_name("test_compat.py")


def supported_versions() -> list[str]:
    oldest = re.search(r'"ray>=2\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    newest = re.search(r"^ray==2\.(\d+)\.\d+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert oldest is not None
    assert newest is not None
    return [f"2.{minor}" for minor in range(int(oldest[1]), int(newest[1]) + 1)]


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """A folder for one version of Ray (300 MB), removed with the test."""
    with tempfile.TemporaryDirectory(prefix="quire-ray-") as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", supported_versions())
def test_compat_passes_its_tests_with_ray_version(version: str, ray_folder: Path) -> None:
    install(f"ray=={version}.*", ray_folder)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ray_folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    }
    command = [sys.executable, "-c", "import ray; print(ray.__version__)"]
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=True
    )
    assert found.stdout.startswith(f"{version}.")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(COMPAT_TESTS)]
    tests = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert tests.returncode == 0, tests.stdout + tests.stderr


def install(requirement: str, folder: Path) -> None:
    """Install a package without its dependencies; skip the test if the index does not have it."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(folder),
        requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0 and re.search("No matching distribution|NewConnectionError", done.stderr):
        pytest.skip(f"the package index has no {requirement}: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
