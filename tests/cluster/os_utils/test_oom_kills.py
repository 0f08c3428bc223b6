"""The end of a process by the kernel's out-of-memory killer is told from other ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadlines import PROGRAM_TIMEOUT_S

from quire.cluster.os_utils import oom_kills
from quire.cluster.os_utils.oom_kills import OomKills
from quire.cluster.os_utils.process_exit import ProcessExit

LIMIT_BYTES = 48 << 20
# Waits for a line, then takes more memory than the limit.
EATER = f"input(); bytearray(b'x') * {4 * LIMIT_BYTES}"


@pytest.mark.parametrize(
    ("controller", "counter", "limit", "unlimited"),
    [
        ("memory", "memory.oom_control", "memory.limit_in_bytes", "9223372036854771712"),
        ("", "memory.events", "memory.max", "max"),
    ],
    ids=["version 1", "version 2"],
)
def test_kill_since_the_start_is_told_with_the_limit(
    controller: str, counter: str, limit: str, unlimited: str, tmp_path: Path
) -> None:
    folder = tmp_path / controller
    folder.mkdir(exist_ok=True)
    (folder / counter).write_text("low 0\noom_kill 3\n")
    (folder / limit).write_text(f"{LIMIT_BYTES}\n")
    kills = OomKills(os.getpid(), tmp_path)
    assert kills.describe() == ""
    (folder / counter).write_text("low 0\noom_kill 4\n")
    assert kills.describe() == (
        "its control group ran out of memory (limit 48 MiB), and the kernel killed a process there"
    )
    (folder / limit).write_text(f"{unlimited}\n")
    assert kills.describe() == "its control group ran out of memory, and the kernel killed a process there"


def test_system_without_counters_tells_of_no_kills(tmp_path: Path) -> None:
    assert OomKills(os.getpid(), tmp_path).describe() == ""


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """Yield a control group with a limit of memory."""
    version_1 = Path("/sys/fs/cgroup/memory")
    folder = (version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")) / f"quire-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        names = [name for name in oom_kills._LIMITS if (folder / name).exists()]
        if not names:
            pytest.skip("the memory of control groups cannot be limited here")
        (folder / names[0]).write_text(f"{LIMIT_BYTES}")
        yield folder
    finally:
        folder.rmdir()


def test_process_that_exceeds_a_real_limit_is_described(limited_group: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", EATER], stdin=subprocess.PIPE)
    (limited_group / "cgroup.procs").write_text(f"{process.pid}")
    ended = ProcessExit(process.pid)
    process.communicate(b"\n", timeout=PROGRAM_TIMEOUT_S)
    assert process.returncode == -9
    assert ended.describe().endswith(
        "its control group ran out of memory (limit 48 MiB), and the kernel killed a process there"
    )
    ended.close()
