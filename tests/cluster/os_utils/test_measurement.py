"""The origin that a file of measured figures names."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from quire.cluster.os_utils.measurement import commit, machine, write_measurement


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_commit_is_that_of_the_folder_and_tells_changes_of_code(tmp_path: Path) -> None:
    assert commit(tmp_path) == ""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "code").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    head = git(tmp_path, "rev-parse", "--short=8", "HEAD")
    assert commit(tmp_path) == head
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "other.json").write_text("{}")
    assert commit(results) == head
    (tmp_path / "code").write_text("2")
    assert commit(results) == f"{head}+changes"


def test_machine_names_a_forced_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", "baseline")
    assert "(QUIRE_CPU_ISA=baseline)" in machine()
    monkeypatch.delenv("QUIRE_CPU_ISA")
    assert "QUIRE_CPU_ISA" not in machine()


def test_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.json"
    for value in (1.0, 2.0):
        write_measurement(path, "python -m x", {"a": {"value": value, "unit": "s", "note": ""}})
    record = json.loads(path.read_text())
    assert set(record) == {"command", "date", "machine", "commit", "figures"}
    assert record["figures"]["a"]["value"] == 2.0
    assert list(path.parent.iterdir()) == [path]
