"""Engines in processes of their own: they take turns, rest while others are measured, and may fail."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import offline
from benchmarks.peers import process
from benchmarks.peers.process import Engine, EngineFailed

ENGINE = Path(process.__file__).parent / "engine.py"

SCRIPT = """
import sys, time
sys.path.insert(0, {folder!r})
from engine import parse_arguments, serve

arguments = parse_arguments(None)

def load():
    print("an engine may say what it wants")
    def generate(requests):
        if len(requests) == {fails_at}:
            raise RuntimeError("out of order")
        return [length for _, length in requests]
    return generate

serve(load)
"""
OPTIONS = ["--model-dir", "nowhere", "--threads", "1"]


@pytest.fixture
def make_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    def make(name: str = "quire", fails_at: int = 0) -> Engine:
        script = tmp_path / f"{name}.py"
        script.write_text(SCRIPT.format(folder=str(ENGINE.parent), fails_at=fails_at))
        monkeypatch.setitem(process.MODULES, name, str(script))
        return Engine(name, Path(sys.executable), OPTIONS, tmp_path / f"{name}.log")

    return make


def test_an_engine_answers_and_ends(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make_engine()
    try:
        assert engine.load_s >= 0
        assert engine.seconds([([1, 2], 3), ([4], 5)]) > 0
        engine.pause()
        stopped = os.waitid(os.P_PID, engine._process.pid, os.WSTOPPED)
        assert stopped is not None
        assert stopped.si_status == signal.SIGSTOP
        engine.resume()
        assert engine.seconds([([1], 1)]) > 0
    finally:
        engine.close()
    assert engine._process.poll() is not None
    assert "an engine may say what it wants" in (tmp_path / "quire.log").read_text()


def test_an_engine_that_fails_is_named(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make_engine("vllm", fails_at=2)
    try:
        assert engine.seconds([([1], 1)]) > 0
        with pytest.raises(EngineFailed, match=r"vllm has ended; see .*vllm\.log"):
            engine.seconds([([1], 1), ([2], 1)])
    finally:
        engine.close()
    assert "out of order" in (tmp_path / "vllm.log").read_text()


def test_engines_take_turns() -> None:
    turns: list[tuple[str, int]] = []

    def clock(name: str) -> offline.Clock:
        return lambda requests: turns.append((name, requests[0][1])) or float(len(turns))

    walls = offline.time_all({"a": clock("a"), "b": clock("b")}, lambda n: [([1], n)], repetitions=2)
    assert turns == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert walls == {"a": [1.0, 3.0], "b": [2.0, 4.0]}


def test_a_run_goes_on_without_an_engine_that_fails(
    make_engine: Callable[..., Engine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, fails_at in (("quire", 0), ("vllm", 1)):
        make_engine(name, fails_at).close()  # its script remains
    environment = tmp_path / "vllm" / "bin"
    environment.mkdir(parents=True)
    (environment / "python").symlink_to(sys.executable)
    arguments = argparse.Namespace(
        engines="quire,vllm,llama.cpp", peers=tmp_path, dtype="float32", tensor_parallel_size=1,
        workloads="w1,w3", repetitions=1,
    )  # fmt: skip
    figures = offline.measure_peers(arguments, tmp_path)
    assert figures["peers.quire.w1.output_tokens_per_s"].value > 0
    assert figures["peers.vllm.w1.output_tokens_per_s"].value > 0
    # The single request is the one that it cannot answer.
    assert "peers.quire.w3.first_token_ms" in figures
    assert "peers.vllm.w3.first_token_ms" not in figures
    said = capsys.readouterr().out
    assert "vllm: vllm has ended; see" in said
    assert f"llama.cpp: is not installed in {tmp_path}" in said


def test_the_prompts_are_those_of_the_workloads() -> None:
    w1, w5 = offline.mixed(64, 0), offline.shared_prefix(32, 1)
    assert sum(len(prompt) for prompt, _ in w1) == 10198
    assert sum(length for _, length in w1) == 6495
    assert all(prompt[:512] == w5[0][0][:512] and len(prompt) == 544 for prompt, _ in w5)
    assert offline.mixed(64, 1)[0][0] != w1[0][0]
