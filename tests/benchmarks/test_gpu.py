"""benchmarks.gpu: every stage runs to its end on a CPU, and failures are recorded."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton_device  # noqa: F401  (before Triton)
from deadlines import PROGRAM_TIMEOUT_S
from fake_deep_gemm import FakeDeepGemm
from fake_fla import FakeFla
from fake_flashinfer import FakeFlashInfer
from kernel_references import find_reference
from launched_kernels import ops_with_kernels
from torch import Tensor

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import again, block_float8_ops, kernels, libraries, ops, smoke, state_ops, table
from benchmarks.gpu.device_time import summarize
from benchmarks.gpu.record import Record, read_figure, read_results, read_stage
from benchmarks.gpu.sizes import CPU, LLAMA_8B
from benchmarks.gpu.stages import PART_S, PARTS, STAGES, Stage
from quire.kernels import dispatch
from quire.worker.libraries import flashinfer
from quire.worker.libraries.flash_linear_attention import FlashLinearAttention

ROOT = Path(__file__).parents[2]
SMALLEST = replace(
    CPU,
    decodes=((1, 24), (2, 24), (1, 40)),
    prefill_lens=(24,),
    mixed_s=0.05,
    num_timed=2,
    num_sampled=(2,),
    repeat_s=0.0,
)
# Modules that a machine with torch, Triton, transformers and msgpack may lack.
MISSING = (
    "ray",
    "zmq",
    "grpc",
    "fastapi",
    "uvicorn",
    "pydantic",
    "typer",
    "rich",
    "jsonschema",
    "hypothesis",
)
# Connects to this machine only, as a machine without a network.
NO_NETWORK = """
import socket

connect = socket.socket.connect


def connect_here(self, address):
    is_here = self.family == socket.AF_UNIX or str(address[0]) in ("127.0.0.1", "::1", "localhost")
    if not is_here:
        raise OSError(f"no network: {address}")
    return connect(self, address)


socket.socket.connect = connect_here
"""
# The stage `checks` runs pytest.
IN_PROCESS = [stage.name for stage in STAGES if stage.name != "checks"]
# Ends of figures that a dry run does not have.
ON_GPU_ONLY = ("host_gap_us", "over_budget", "fp8_fast")
LONG = ("smoke", "tokens", "reference", "ranks", "variants", "adapters", "drafts")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the work folder, in which stages share the model."""
    return tmp_path_factory.mktemp("work")


@pytest.mark.parametrize(
    "stage", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in IN_PROCESS]
)
def test_stage_runs_on_cpu_without_problems(stage: str, tmp_path: Path, work: Path) -> None:
    record = Record(tmp_path, stage, time.monotonic() + 3600, "CPU")
    importlib.import_module(f"benchmarks.gpu.{stage}").run(record, tmp_path, work, SMALLEST)
    assert record.problems == []
    written = read_stage(tmp_path, stage)
    assert list(written["figures"]) == list(record.figures)
    assert written["figures"] or stage == "collectives"


def test_stages_and_table_agree() -> None:
    """Each row belongs to a stage. The stages without rows pass or fail, or have theirs beside those of `engine`."""
    owners = {"roof": "environment"}
    with_rows = {owners.get(prefix, prefix) for prefix in (goal.figure.split(".")[0] for goal in table.GOALS)}
    names = {stage.name for stage in STAGES}
    assert with_rows == names - {"tokens", "smoke", "again", "collectives", "variants", "checks"}
    assert all(importlib.util.find_spec(f"benchmarks.gpu.{name}") for name in names)


def test_smoke_runs_every_op_that_has_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """But the fused all-reduce, which the stage `collectives` runs on two streams."""
    launched = set()

    class Kernels:
        def __init__(self, module: str) -> None:
            self._module = module

        def __getattr__(self, name: str) -> Any:
            launched.add(name)
            return find_reference(self._module, name)

    monkeypatch.setattr(dispatch, "has_kernels", lambda tensor: True)
    monkeypatch.setattr(dispatch, "_load", Kernels)
    with torch.inference_mode():
        for case in ops.cases(SMALLEST):
            case.make(0)()
    assert launched == ops_with_kernels() - {"all_reduce_add_rms_norm"}


def test_sweep_of_tiles_runs_on_a_cpu(tmp_path: Path) -> None:
    """Its ops compute on the CPU, whatever the tile."""
    pytest.importorskip("triton")
    record = Record(tmp_path, "kernels", time.monotonic() + 3600, "CPU")
    with torch.inference_mode():
        kernels.sweep(record, SMALLEST, ((1, 24), (2, 24)), 24)
    assert record.problems == []
    swept = [name for name in record.figures if ".sweep." in name]
    num_tiles = 3 * len(kernels.DECODE_SWEEP) + 2 * len(kernels.PREFILL_SWEEP)
    assert len(swept) == num_tiles + sum(map(len, kernels.EXPERT_SWEEP.values()))


def test_products_by_deep_gemm_equal_those_of_quire(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDeepGemm()
    monkeypatch.setitem(sys.modules, "deep_gemm", fake)
    monkeypatch.setattr(block_float8_ops, "has_deep_gemm", lambda sizes: True)
    bfloat16 = replace(SMALLEST, dtype="bfloat16")
    with torch.inference_mode():
        for case in block_float8_ops.block_float8_cases(bfloat16, 4):
            results = []
            for make in (case.make, case.peers["deep_gemm"]):
                torch.manual_seed(0)
                results.append(make(0)())
            own, peer = results
            assert isinstance(own, Tensor)
            assert isinstance(peer, Tensor)
            # Tokens, and inner activations of experts, in float8 have 4 significant bits.
            assert float((own - peer).float().norm()) < 0.08 * float(own.float().norm())
    assert fake.num_calls == 3


def test_attention_by_flashinfer_equals_that_of_quire(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeFlashInfer()
    fake.latent_dims = SMALLEST.latent_model.kv_lora_rank, SMALLEST.latent_model.qk_rope_head_dim
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(libraries, "installed_libraries", lambda device: ["flashinfer"])
    monkeypatch.setattr(flashinfer, "HEAD_DIMS", (SMALLEST.model.head_dim,))
    monkeypatch.setattr(flashinfer, "LATENT_DIMS", (fake.latent_dims,))
    compared = []
    with torch.inference_mode():
        for case in ops.cases(replace(SMALLEST, dtype="bfloat16")):
            if "flashinfer" in case.peers:
                results = []
                for make in (case.make, case.peers["flashinfer"]):
                    torch.manual_seed(0)
                    results.append(make(0)())
                torch.testing.assert_close(*results, atol=2e-2, rtol=2e-2)
                compared.append(case.name.split(".")[:-1])
    assert fake.num_runs == len(compared)
    assert [name for name in compared if name != ["decode"]] == [
        ["decode", "sinks"],
        *[["decode", "drafts"]] * 2,
        ["prefill"],
        ["latent_decode"],
        ["latent_decode"],
    ]


def test_delta_rule_by_flash_linear_attention_equals_that_of_quire(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeFla()
    backend = FlashLinearAttention(fake.chunk_gated_delta_rule, fake.chunk_kda)
    monkeypatch.setattr(FlashLinearAttention, "load", classmethod(lambda cls, device: backend))
    monkeypatch.setattr(state_ops, "has_fla", lambda sizes: True)
    case = state_ops.attention_case(replace(SMALLEST, dtype="bfloat16"), 1, 70)
    with torch.inference_mode():
        results = []
        for make in (case.make, case.peers["fla"]):
            torch.manual_seed(0)
            results.append(make(0)())
    for own, peer in zip(*results, strict=True):
        torch.testing.assert_close(peer, own, atol=0.02, rtol=0.02)
    assert fake.num_calls == 1
    assert not state_ops.attention_case(replace(SMALLEST, dtype="bfloat16"), 3, 1).peers


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_kernels_pass_their_comparison(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tolerance must hold for the rounding of each op, and no input may make a kernel differ by design."""
    monkeypatch.setattr(dispatch, "has_kernels", lambda tensor: True)
    compared = []
    with torch.inference_mode():
        for case in ops.cases(replace(SMALLEST, dtype=dtype)):
            # The interpreter truncates to bfloat16, and loses the carry of float8 numbers that round up.
            tolerance = 0.1 if "float8" in case.name else 2 * case.tolerance
            smoke.compare_with_twin(replace(case, tolerance=tolerance))
            compared.append(case.name)
    assert len(compared) > 20


@pytest.mark.parametrize(
    ("module", "name", "spoil"),
    [
        ("norm", "rms_norm", lambda op: lambda x, *rest: op(ignore_strides(x), *rest)),
        ("norm", "add_rms_norm", lambda op: lambda x, residual, *rest: op(x, residual.clone(), *rest)),
        (
            "fused_qk_norm_rope_kv_write",
            "fused_qk_norm_rope_kv_write",
            lambda op: lambda heads, cache, *rest: op(heads, cache.clone(), *rest),
        ),
        (
            "paged_decode",
            "paged_decode_attention",
            lambda op: lambda q, cache, *rest, **scales: op(q, ignore_strides(cache), *rest, **scales),
        ),
    ],
    ids=["strides of tokens", "residual not written", "cache not written", "strides of blocks"],
)
def test_comparison_finds_a_wrong_kernel(
    module: str, name: str, spoil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that takes rows for dense, or does not write what it should, cannot pass."""
    monkeypatch.setattr(dispatch, "has_kernels", lambda tensor: True)
    load = dispatch._load
    wrong = SimpleNamespace(**vars(load(module)) | {name: spoil(find_reference(module, name))})
    monkeypatch.setattr(dispatch, "_load", lambda home: wrong if home == module else load(home))
    pattern = r"decode\.\d" if module == "paged_decode" else rf"{name}\."
    with torch.inference_mode():
        cases = [case for case in ops.cases(SMALLEST) if re.match(pattern, case.name)]
        assert cases
        for case in cases:
            with pytest.raises(AssertionError, match="has the relative error"):
                smoke.compare_with_twin(case)


def ignore_strides(x: Tensor) -> Tensor:
    """Return what a kernel reads that takes a tensor for a dense one."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_command_runs_all_stages_without_other_packages(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for name in MISSING:
        (missing / name).mkdir(parents=True)
        (missing / name / "__init__.py").write_text(f"raise ImportError('no {name}')")
    (missing / "sitecustomize.py").write_text(NO_NETWORK)
    out = tmp_path / "out"
    path = os.pathsep.join((str(missing), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), "--device", "cpu", "--minutes", "15",
         "--stages", ",".join(IN_PROCESS)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=880,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = read_results(out)
    assert [result["stage"] for result in results] == IN_PROCESS
    assert [path.name for path in out.iterdir()] == ["result.json"]
    # A dry run has other sizes.
    measured = {without_sizes(name) for result in results for name in result["figures"]}
    unmeasured = {goal.figure for goal in table.GOALS if without_sizes(f"gpu.{goal.figure}") not in measured}
    assert all(figure.endswith(ON_GPU_ONLY) for figure in unmeasured), unmeasured


def without_sizes(figure: str) -> str:
    """Return a figure's name without the sizes in it, and without the roof that bounds a kernel at these sizes."""
    figure = re.sub(r"^(gpu\.kernels\..*)\.(share_of_copy|tflops)$", r"\1.us", figure)
    return re.sub(r"\d+", "#", figure)


def test_parts_have_every_stage_and_fit_their_time() -> None:
    assert {name for names in PARTS.values() for name in names} == {stage.name for stage in STAGES}
    limits = {stage.name: stage.limit_s for stage in STAGES}
    for names in PARTS.values():
        assert sum(limits[name] for name in names) <= PART_S


@pytest.mark.parametrize("is_right", [True, False], ids=["right", "wrong"])
def test_failed_op_runs_again_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_right: bool
) -> None:
    name = next(iter(ops.cases(CPU))).name
    earlier = Record(tmp_path, "smoke", time.monotonic() + 100, "CPU")
    for failed in (name, "tiny model"):  # the second is no op
        with earlier.case(failed):
            assert not failed, "output 0 has the relative error 1"
    monkeypatch.setattr(again, "OP_S", PROGRAM_TIMEOUT_S)
    record = Record(tmp_path, "again", time.monotonic() + (3600 if is_right else 0), "CPU")
    again.run(record, tmp_path, tmp_path, CPU)
    assert read_figure(tmp_path, "again", "again.ops") == 1
    if is_right:
        assert f"exit status 0\n{name} passes when launches wait" in record.notes[name]
    else:
        assert record.problems[0]["error"].startswith("not run: needs 5 s")


def run_stage(stage: Stage, out: Path, **environment: str) -> dict[str, object]:
    arguments = argparse.Namespace(out=out, device="cpu")
    command.run_stage(stage, arguments, out, time.monotonic() + 3600, os.environ | environment)
    return read_stage(out, stage.name)


def test_late_stage_is_killed_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LEAST_S", 0.0)
    record = run_stage(Stage("environment", 0.05), tmp_path)
    assert record["status"] == "timed out after 0 s"


def test_crashed_stage_is_recorded_with_its_output(tmp_path: Path) -> None:
    record = run_stage(Stage("environment", 60), tmp_path, PYTHONPATH=str(tmp_path), PYTHONHOME=str(tmp_path))
    assert record["status"] == "failed with 1" or record["status"] == "failed"
    assert "Python" in str(record["log"])


def test_stage_without_time_is_not_run(tmp_path: Path) -> None:
    assert run_stage(Stage("environment", 1.0), tmp_path)["status"] == "not run"


def test_problem_is_recorded_with_its_trace_and_the_stage_goes_on(tmp_path: Path) -> None:
    record = Record(tmp_path, "smoke", time.monotonic() + 100, "CPU")
    with record.case("division"):
        _ = 1 / 0
    assert not record.begins("too long", 1000)
    assert record.begins("in time", 1)
    record.add("later", 2.5, "ms")
    written = read_stage(tmp_path, "smoke")
    division, late = written["problems"]
    assert division["case"] == "division"
    assert "ZeroDivisionError" in division["trace"]
    assert late["error"].startswith("not run: needs 1000 s")
    assert read_figure(tmp_path, "smoke", "later") == 2.5


# A stage of five cases: the second loses the device, the fourth crashes.
CASES = """
import os


def run(record, folder, work, sizes):
    for index in range(5):
        if record.begins(f"case {index}"):
            with record.case(f"case {index}"):
                if index == 1:
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")
                if index == 3:
                    os.abort()
                record.add(f"cases.{index}", os.getpid(), "")
"""


def test_stage_goes_on_in_another_process_after_a_case_that_ends_one(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\n"
        "module = types.ModuleType('benchmarks.gpu.checks')\n"
        f"exec({CASES!r}, vars(module))\n"
        "sys.modules[module.__name__] = module\n"
    )
    out = tmp_path / "out"
    out.mkdir()
    Record(out, "earlier", 0.0, "CPU").add("kept", 1.0, "")
    path = os.pathsep.join((str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")))
    arguments = argparse.Namespace(out=out, device="cpu")
    command.run_stage(
        Stage("checks", 3600), arguments, out, time.monotonic() + 3600, os.environ | {"PYTHONPATH": path}
    )
    record: Any = read_stage(out, "checks")
    assert record["status"] == "done"
    assert list(record["figures"]) == ["gpu.cases.0", "gpu.cases.2", "gpu.cases.4"]
    assert len({figure["value"] for figure in record["figures"].values()}) == 3
    assert [problem["case"] for problem in record["problems"]] == ["case 1", "case 3"]
    assert "illegal memory access" in record["problems"][0]["error"]
    assert record["problems"][1]["error"] == "the process failed with -6"
    assert read_figure(out, "earlier", "kept") == 1.0


def test_summary_shows_measured_goals_and_problems() -> None:
    figures = {"gpu.engine.decode.1x1024.graphs.step_ms": {"value": 4.1234, "unit": "ms", "note": ""}}
    problems = [{"case": "fp8", "error": "RuntimeError: no\nmore", "trace": ""}]
    results = [{"stage": "engine", "status": "failed with -9", "figures": figures, "problems": problems}]
    (line,) = table.summary(results)
    assert line.split() == [
        "8B:",
        "step",
        "of",
        "1",
        "row,",
        "1k",
        "tokens",
        "4.123",
        "ms",
        "goal:",
        "4.2",
        "on",
        "an",
        "H200",
    ]
    assert list(table.problem_lines(results)) == ["engine: failed with -9", "engine, fp8: RuntimeError: no"]


def test_device_time_counts_overlapping_kernels_once() -> None:
    found = summarize([("a", 0.0, 2.0), ("b", 1.0, 3.0), ("a", 5.0, 6.0), ("b", 5.5, 5.7)], num_steps=2)
    assert (found.busy_s, found.gap_s) == (2.0, 1.0)
    assert found.kernels[0] == ("a", 1.0, 1.5e6)


def test_llama_8b_has_eight_billion_parameters() -> None:
    embedding = LLAMA_8B.vocab_size * LLAMA_8B.hidden_size
    assert round((LLAMA_8B.num_parameters + embedding) / 1e9, 1) == 8.0
    assert 2 * LLAMA_8B.kv_numbers == 131072
