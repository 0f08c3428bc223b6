"""Runs of tests in several processes, and the run of what failed after one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

# Fails as long as the file "mended" is missing.
FILES = {
    "test_first.py": """
from pathlib import Path
import pytest

def test_passes():
    pass

@pytest.mark.parametrize("text", ["a", "a@b"])
def test_fails(text):
    assert Path(__file__).with_name("mended").exists()
""",
    "test_cluster.py": """
from pathlib import Path
import pytest

@pytest.mark.cluster
def test_fails():
    assert Path(__file__).with_name("mended").exists()
""",
    "test_second.py": "def test_passes(): pass",
    "pytest.ini": f"""
[pytest]
pythonpath = {TESTS / "support"}
addopts = --import-mode=importlib
markers = cluster
""",
}


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    shutil.copy(TESTS / "conftest.py", tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def last_line(tests: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True, timeout=120)
    return run.stdout.splitlines()[-1]


def test_only_what_failed_in_several_processes_runs_again(tests: Path) -> None:
    whole = last_line(tests, "-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder")
    assert "3 failed, 2 passed" in whole
    (tests / "mended").touch()
    assert "3 passed" in last_line(tests, "--last-failed", "--last-failed-no-failures", "none")
