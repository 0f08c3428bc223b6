"""Engines in their own processes: stopped while others are measured, allowed to fail, killed with their parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tarfile
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.common import Figure
from benchmarks.peers import install, process
from benchmarks.peers.comparison import Comparison, Limits
from benchmarks.peers.engine import Requests
from benchmarks.peers.process import Engine, EngineTooSlow
from benchmarks.workloads import Workload, throughput, warm_up

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 200.0
LIMITS = Limits(load_s=TIMEOUT_S, workload_s=TIMEOUT_S, total_s=600.0)

SLEEP = 99
# Sleeps on a request of length 0, shortly on one with the prompt SLEEP, and fails on one without a prompt.
ENGINE = f"""
import subprocess, sys, time
sys.path.insert(0, {str(ROOT / "benchmarks/peers")!r})
from engine import parse_arguments, serve

arguments = parse_arguments(None)

def load():
    print("output of the engine itself")
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    def generate(requests):
        for prompt, length in requests:
            if not prompt:
                raise RuntimeError("empty prompt")
            if prompt == [{SLEEP}]:
                time.sleep(0.6)
            if length == 0:
                time.sleep(600)
        return [length for _, length in requests]
    return generate

serve(load)
"""
# Starts an engine, stops it, prints the pids of its supervisor and of its processes, and sleeps.
PARENT = """
import sys, time
from pathlib import Path
from benchmarks.peers import install, process
process.MODULES["quire"] = sys.argv[1]
engine = process.Engine("quire", Path(), ["--model-dir", "nowhere", "--threads", "1"], Path(sys.argv[2]), 200.0)
engine.pause()
print(engine._supervisor.pid, *(each.pid for each in engine._processes()), flush=True)
time.sleep(600)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "fake_engine.py"
    path.write_text(ENGINE)
    return path


@pytest.fixture
def start(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def start(name: str = "quire", timeout_s: float = TIMEOUT_S, **more: bool) -> Engine:
        monkeypatch.setitem(process.MODULES, name, str(script))
        options = ["--model-dir", "nowhere", "--threads", "1"]
        started.append(Engine(name, tmp_path, options, tmp_path / f"{name}.log", timeout_s, **more))
        return started[-1]

    # Looks like an installed environment.
    (tmp_path / "vllm" / "bin").mkdir(parents=True)
    (tmp_path / "vllm" / "bin" / "python").symlink_to(sys.executable)
    yield start
    for engine in started:
        engine.kill()


def wait_until_ended(pids: list[int]) -> None:
    for pid in pids:
        try:
            ended = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([ended], [], [], TIMEOUT_S)[0], f"{psutil.Process(pid)} is still running"
        finally:
            os.close(ended)


def wait_until_stopped(processes: set[psutil.Process]) -> None:
    """Poll, because a signal takes effect asynchronously and only a parent can wait for it."""
    deadline = time.monotonic() + TIMEOUT_S
    while {each.status() for each in processes} != {psutil.STATUS_STOPPED}:
        assert time.monotonic() < deadline, f"not all are stopped: {processes}"
        time.sleep(0.01)


def test_engine_serves_requests_and_closes(start: Callable[..., Engine], tmp_path: Path) -> None:
    engine = start()
    assert engine.load_s >= 0
    assert engine.seconds([([1, 2], 3), ([4], 5)], TIMEOUT_S) > 0
    engine.pause()
    processes = engine._processes()
    assert len(processes) == 2, "the engine and its child"
    wait_until_stopped(processes)
    engine.resume()
    assert engine.seconds([([1], 1)], TIMEOUT_S) > 0
    engine.pause()
    engine.close()
    wait_until_ended([each.pid for each in processes])
    assert "output of the engine itself" in (tmp_path / "quire.log").read_text()


def test_processor_time_of_an_engine_is_without_its_sleep(start: Callable[..., Engine]) -> None:
    request: Requests = [([SLEEP], 1)]
    wall, processor = (
        start(counts_processor_time=counts).seconds(request, TIMEOUT_S) for counts in (False, True)
    )
    assert wall > 0.5 > processor


def test_engine_that_exceeds_its_timeout_is_killed(start: Callable[..., Engine]) -> None:
    engine = start()
    processes = engine._processes()
    with pytest.raises(EngineTooSlow):
        engine.seconds([([1], 0)], 0.1)
    engine.kill()
    wait_until_ended([each.pid for each in processes])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_stopped_engine_is_killed_when_its_parent_dies(
    script: Path, tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-c", PARENT, str(script), str(tmp_path / "log")]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 3, "the supervisor, the engine and its child"
    parent.send_signal(number)
    parent.wait(TIMEOUT_S)
    wait_until_ended(pids)


@pytest.mark.parametrize("is_link", [True, False])
def test_install_never_clears_an_environment(
    is_link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to the user's own environment is left unchanged; an interrupted installation is continued."""
    home = tmp_path / ("own" if is_link else "vllm")
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "kept").touch()
    if is_link:
        (tmp_path / "vllm").symlink_to(home)
    commands: list[list[str]] = []
    real = venv.create
    monkeypatch.setattr(venv, "create", lambda path, with_pip, **more: real(path, **more))

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return subprocess.CompletedProcess(command, int(command[-1] == "import torchvision"))

    monkeypatch.setattr(subprocess, "run", run)
    install.install(tmp_path, "vllm")
    assert (home / "bin" / "kept").exists()
    assert bool(commands) is not is_link
    removed = [command[-1] for command in commands if "uninstall" in command]
    assert removed == ([] if is_link else ["torchvision"]), (
        "only packages that cannot be imported are removed"
    )


def test_install_keeps_folders_of_a_source_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's converter is in no wheel."""

    def run(command: list[str], **_: object) -> None:
        if "download" in command:
            archive = Path(command[command.index("--dest") + 1]) / "package-1.tar.gz"
            with tarfile.open(archive, "w:gz") as source:
                for name in (
                    "vendor/llama.cpp/conversion/base.py",
                    "vendor/llama.cpp/README",
                    "conversion/base.py",
                ):
                    source.addfile(tarfile.TarInfo(f"package-1/{name}"))

    monkeypatch.setattr(venv, "create", lambda path, **_: path.mkdir())
    monkeypatch.setattr(subprocess, "run", run)
    install.install(tmp_path, "llama.cpp")
    found = {path.relative_to(tmp_path) for path in (tmp_path / "llama.cpp").rglob("*") if path.is_file()}
    home = Path("llama.cpp")
    assert found == {home / ".ready", home / "constraints.txt", home / "sources" / "conversion" / "base.py"}


class FakeEngine:
    """Reports as many seconds as there were turns so far; requests of length 0 time out."""

    load_s = 0.0

    def __init__(self, name: str, turns: list[tuple[str, int]]) -> None:
        self.name, self.turns = name, turns

    def seconds(self, requests: Requests, timeout_s: float) -> float:
        self.turns.append((self.name, len(requests)))
        if requests[0][1] == 0:
            raise EngineTooSlow("gave no answer")
        return float(len(self.turns))

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def begin_close(self) -> None: ...
    def close(self) -> None: ...
    def kill(self) -> None: ...


@pytest.fixture
def compare() -> Callable[..., tuple[list[tuple[str, int]], dict[str, Figure]]]:
    """`compare(names, workload, limits, repetitions) -> (turns, figures)`, with loaded fake engines."""

    def run(
        names: list[str], workload: Workload, limits: Limits, repetitions: int
    ) -> tuple[list[tuple[str, int]], dict[str, Figure]]:
        turns: list[tuple[str, int]] = []

        def start(name: str, timeout_s: float) -> Any:
            return FakeEngine(name, turns)

        with Comparison(names, start, limits, warm_up()) as comparison:
            comparison.load()
            turns.clear()
            return turns, comparison.measure("w", workload, repetitions)

    return run


def growing() -> Workload:
    """One request in the first repetition, two in the second."""
    return throughput(lambda repetition: [([1, 2], 1)] * (1 + repetition))


def test_comparison_continues_without_a_failed_engine(start: Callable[..., Engine]) -> None:
    breaks = Workload(lambda _: [[([], 1)]], growing().figures)
    with Comparison(["quire", "llama.cpp", "vllm"], start, LIMITS, warm_up()) as comparison:
        figures = comparison.load()
        assert set(figures) == {"quire.load_s", "llama_cpp.load.failed_after_s", "vllm.load_s"}
        assert figures["llama_cpp.load.failed_after_s"].note == "llama.cpp is not installed"
        failures = comparison.measure("broken", breaks, 2)
        assert {name: figure.note for name, figure in failures.items()} == {
            "quire.broken.failed_after_s": "has ended; see quire.log",
            "vllm.broken.failed_after_s": "has ended; see vllm.log",
        }
        again = comparison.measure("w", growing(), 2)
    assert {name for name in again if name.endswith("load_s")} == {"quire.load_s", "vllm.load_s"}
    assert again["vllm.w.output_tokens_per_s"].value > 0
    assert again["vllm.w.output_tokens_per_s"].note == ""


def test_engines_take_turns_and_warm_up_after_each_pause(compare: Any) -> None:
    turns, figures = compare(["a", "b"], growing(), LIMITS, repetitions=2)
    warm = len(warm_up())
    assert turns == [
        ("a", warm),
        ("a", 1),
        ("b", warm),
        ("b", 1),
        ("a", warm),
        ("a", 2),
        ("b", warm),
        ("b", 2),
    ]
    assert figures["b.w.output_tokens_per_s"].value == pytest.approx(1 / 6)
    assert figures["b.w.output_tokens_per_s_best"].value == pytest.approx(1 / 4)


def test_slow_engine_keeps_its_finished_repetitions(compare: Any) -> None:
    hangs_later = Workload(lambda repetition: [[([1], 1 - repetition)]], growing().figures)
    turns, figures = compare(["a"], hangs_later, LIMITS, repetitions=3)
    assert len(turns) == 4  # two warm-ups among them
    assert figures["a.w.output_tokens_per_s"].note == "1 of 3 repetitions: did not finish w in 0 s"
