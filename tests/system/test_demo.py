"""The demo as a child process, as `make demo` runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from deadlines import COMMAND_TIMEOUT_S

pytestmark = pytest.mark.cluster

COMMAND = sys.executable, "-m", "quire.cluster.cli.demo"
MOST_TRIES = 5
FIGURES = (
    "demo.throughput",
    "demo.ttft.p50",
    "demo.itl.p50",
    "demo.steps",
    "demo.kv.peak_blocks",
    "demo.kv.waste",
)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder with a short path, because Unix sockets are created under it."""
    with tempfile.TemporaryDirectory(prefix="q") as folder:
        yield Path(folder)


def left_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith("q")]


def test_demo_finishes_every_request_and_leaves_nothing(temporary: Path, tmp_path: Path) -> None:
    record = tmp_path / "demo.json"
    environment = os.environ | {"TMPDIR": str(temporary), "DEMO_JSON": str(record)}
    result = subprocess.run(
        COMMAND, env=environment, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "It was a dark evening, and" in result.stdout
    assert "no process, no shared memory, no socket" in result.stdout
    assert "Traceback" not in result.stderr
    written = json.loads(record.read_text())
    assert written.keys() == {"command", "date", "machine", "commit", "figures"}
    assert written["figures"]["demo.requests"]["value"] == 12
    assert written["figures"]["demo.prefix.hit_rate"]["value"] > 0
    assert all(written["figures"][name]["value"] > 0 for name in FIGURES)
    assert left_in(temporary) == []


def interrupted_demo(moment: str, pause_s: float, temporary: Path) -> tuple[int, str, str]:
    """Press Ctrl-C some time after the demo prints a line; return its exit status, and what it printed until then."""
    demo = subprocess.Popen(
        COMMAND,
        env=os.environ | {"TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert demo.stdout is not None
    output = ""
    for line in demo.stdout:
        output += line
        if line.startswith(moment):
            break
    time.sleep(pause_s)
    with suppress(ProcessLookupError):
        os.killpg(demo.pid, signal.SIGINT)
    rest, _ = demo.communicate(timeout=COMMAND_TIMEOUT_S)
    return demo.returncode, output, rest


@pytest.mark.parametrize(
    ("moment", "pause_s"),
    [
        pytest.param("starting", 0, id="importing"),
        pytest.param("starting", 3, id="starting Ray"),
        pytest.param("ready on", 0, id="ready", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_shuts_down_and_leaves_nothing(moment: str, pause_s: float, temporary: Path) -> None:
    for _ in range(MOST_TRIES):
        status, output, rest = interrupted_demo(moment, pause_s, temporary)
        if status != 0:  # otherwise it had ended before this process was run again
            break
    assert status == 130, output + rest
    assert "Traceback" not in rest
    assert "no process, no shared memory, no socket" in rest
    assert left_in(temporary) == []
