"""The pure wheel: built, installed into an empty folder and used from there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from wheels import FOLDERS, USE, build_wheel, install_wheel, run


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the pure wheel is installed."""
    return install_wheel(build_wheel(tmp_path_factory, QUIRE_WHEEL_PLATFORM="any"), tmp_path_factory)


def test_wheel_holds_the_package_and_nothing_else(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names <= {"quire", "bin"}
    package = installed / "quire"
    assert {path.name for path in package.iterdir() if path.is_dir()} - {"__pycache__"} == set(FOLDERS)
    models = (f"cluster/cli/demo/{model}/model.safetensors" for model in ("model", "vision_model"))
    for needed in ("py.typed", "proto/inference.proto", *models):
        assert (package / needed).is_file(), needed


def test_installed_package_generates(installed: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    run(sys.executable, "-c", USE, str(installed), cwd=str(tmp_path), env=environment)


def test_installed_command_prints_help(installed: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    output = run(str(installed / "bin" / "quire"), "--help", cwd=str(tmp_path), env=environment)
    assert "serve" in output
