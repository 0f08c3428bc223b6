"""The environment of the tools that check containers and charts: `make test-deploy` makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tools() -> Path:
    """The folder of the programs."""
    folder = ROOT / "build" / "deploy-tools" / "bin"
    assert (folder / "hadolint").exists(), "run `make test-deploy`, which makes this environment"
    return folder
