"""Compilation beside the start: its process, what it logs, and one compilation for all ranks of a node."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deadlines import PROGRAM_TIMEOUT_S

from quire.proto.config import EngineConfig
from quire.worker.rank import start_compilation
from quire.worker.rank.start_compilation import (
    CompileRequest,
    NoCompilation,
    StartCompilation,
    compile_at_start,
    with_few_blocks,
)

READ_REQUEST = "import json, pickle, sys; request = pickle.load(sys.stdin.buffer); "


@pytest.fixture
def logged(log_of: Callable[[str], list[str]]) -> list[str]:
    return log_of(start_compilation.__name__)


@pytest.fixture
def request_of_engine(make_model: Any, engine_config: Any) -> CompileRequest:
    config = engine_config(make_model("llama", num_hidden_layers=1), 1)
    return CompileRequest(with_few_blocks(config), 90, 1 << 30)


def test_process_gets_the_engine_and_its_report_is_logged(
    request_of_engine: CompileRequest, logged: list[str]
) -> None:
    text = "print(json.dumps(f'{request.capability} {request.config.cache.num_kv_blocks}'))"
    compilation = StartCompilation(request_of_engine, READ_REQUEST + text)
    compilation.wait()
    compilation.wait()
    assert logged == [f"INFO: 90 {request_of_engine.config.cache.num_kv_blocks}"]


def test_failed_process_is_a_warning(request_of_engine: CompileRequest, logged: list[str]) -> None:
    StartCompilation(request_of_engine, "import os; os._exit(3)").wait()
    (line,) = logged
    assert line.startswith("WARNING")
    assert "ended with 3" in line


def test_late_process_is_killed_with_its_children(
    request_of_engine: CompileRequest, logged: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    monkeypatch.setattr(start_compilation, "TIMEOUT_S", 0.0)
    StartCompilation(
        request_of_engine, program
    ).wait()  # tests/support/left_processes.py finds a child that is left
    (line,) = logged
    assert line.startswith("WARNING")
    assert "were not compiled beside the start in 0 s" in line


def test_stamp_names_the_engine_and_the_gpu(request_of_engine: CompileRequest) -> None:
    config, few = request_of_engine.config, request_of_engine.config.with_num_blocks(3)
    same, other = CompileRequest(config, 90, 1 << 30), CompileRequest(config, 100, 1 << 30)
    assert request_of_engine.stamp == same.stamp
    assert len({same.stamp, other.stamp, CompileRequest(few, 90, 1 << 30).stamp}) == 3


def test_rank_without_a_gpu_compiles_nothing(request_of_engine: CompileRequest) -> None:
    assert isinstance(compile_at_start(request_of_engine.config, torch.device("cpu")), NoCompilation)


def test_variants_are_compiled_by_the_first_rank_of_a_node(
    request_of_engine: CompileRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from triton import knobs

    from quire.worker.ahead import at_start

    recorded: list[EngineConfig] = []

    def record(config: EngineConfig, ranks: list[int], capability: int, gpu_bytes: int) -> list[str]:
        recorded.append(config)
        return ["a", "b"]

    problems = ["no", None]
    monkeypatch.setattr(at_start, "record_variants", record)
    monkeypatch.setattr(
        at_start, "compile_variants", lambda variants, *_: zip(variants, problems, strict=True)
    )
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    assert at_start.compile_once(request_of_engine).endswith("; first problem: no")
    problems[0] = None
    assert at_start.compile_once(request_of_engine).startswith("recorded 2 kernel variants")
    assert "another rank" in at_start.compile_once(request_of_engine)
    assert len(recorded) == 2
    other = CompileRequest(request_of_engine.config, 100, 1 << 30)
    assert at_start.compile_once(other).startswith("recorded 2 kernel variants")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kernels_of_a_small_model_are_compiled_into_the_cache(make_model: Any, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    program = Path(__file__).parents[2] / "support" / "compile_at_start.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(program), str(make_model("llama", num_hidden_layers=1))],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=3 * PROGRAM_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = done.stdout.splitlines()
    num_compiled = int(first.split(", compiled ")[1].split()[0])
    assert num_compiled > 20
    assert len(list(tmp_path.glob("*/*.cubin"))) == num_compiled
    assert "were compiled before the start" in second
