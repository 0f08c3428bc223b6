"""The cleanup process removes what a killed owner leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from quire.cluster.os_utils.cleanup import PrivateDirectory
from quire.cluster.os_utils.processes import ProcessTree, children

OWNER = """
import subprocess, sys, time
from quire.cluster.os_utils.cleanup import PrivateDirectory
directory = PrivateDirectory()
(directory.path / "socket").write_text("")
stubborn = subprocess.Popen(["sleep", "300"], start_new_session=True)
directory.kill_on_exit([stubborn.pid])
print(directory.path, stubborn.pid, flush=True)
time.sleep(300)
"""


def test_killed_owner_leaves_no_process_and_no_directory() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    path, pid = owner.stdout.readline().split()
    assert Path(path, "socket").is_file()
    remaining = ProcessTree([int(pid), *children(owner.pid)])
    owner.kill()
    owner.communicate()
    assert remaining.wait(60) == []
    assert not Path(path).exists()


def test_directory_is_private_and_removed_immediately() -> None:
    directory = PrivateDirectory()
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.remove()
    assert not directory.path.exists()
    directory.remove()


def test_long_temporary_path_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 20)))
    directory = PrivateDirectory()
    assert len(str(directory.path)) < 40
    directory.remove()


def test_process_tree_contains_and_kills_grandchildren() -> None:
    parent = subprocess.Popen(["sh", "-c", "sleep 300 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    grandchild = int(parent.stdout.readline())
    assert parent.pid in children(os.getpid())
    tree = ProcessTree([parent.pid])
    assert sorted(tree.wait(0)) == sorted([parent.pid, grandchild])
    tree.kill()
    assert tree.wait(60) == []
    assert parent.wait() == -signal.SIGKILL
