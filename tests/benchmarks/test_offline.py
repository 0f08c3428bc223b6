"""`python -m benchmarks.offline`: its workloads, and the figures of an interrupted comparison."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import offline
from benchmarks.common import Figure
from benchmarks.workloads import WORKLOADS, mixed, shared_prefix


def test_workloads_have_fixed_lengths_and_new_prompts_per_repetition() -> None:
    w1, w5 = mixed(64, 0), shared_prefix(32, 1)
    assert sum(len(prompt) for prompt, _ in w1) == 10198
    assert sum(length for _, length in w1) == 6495
    assert all(prompt[:512] == w5[0][0][:512] and len(prompt) == 544 for prompt, _ in w5)
    assert mixed(64, 1)[0][0] != w1[0][0]


def test_decode_rate_excludes_the_prefill() -> None:
    figures = WORKLOADS["w3"].figures([[1.0, 3.0], [2.0, 6.0], [1.5, 4.0]])
    assert figures["first_token_ms"].value == 1500.0
    assert figures["decode_tokens_per_s"].value == pytest.approx(127 / 2.5)
    assert figures["decode_tokens_per_s_best"].value == pytest.approx(127 / 2.0)


def test_interrupted_run_keeps_the_figures_measured_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fake:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Fake:
            return self

        def __exit__(self, *_: object) -> None: ...

        def load(self) -> dict[str, Figure]:
            return {"vllm.load.failed_after_s": Figure(1.5, "s", "vllm is not installed")}

        def measure(self, name: str, *_: object) -> dict[str, Figure]:
            if name == "w3":
                raise SystemExit(143)
            return {f"quire.{name}.output_tokens_per_s": Figure(7.0, "tokens/s")}

    monkeypatch.setattr(offline, "Comparison", Fake)
    arguments = argparse.Namespace(
        engines=["quire", "vllm"], peers=tmp_path, dtype="float32", tensor_parallel_size=1,
        workloads=["w1", "w3"], repetitions=1, limit=1.0, minutes=1.0, json=tmp_path / "figures.json",
    )  # fmt: skip
    with pytest.raises(SystemExit):
        offline.measure_peers(arguments, tmp_path, "model s")
    assert json.loads(arguments.json.read_text())["figures"] == {
        "peers.vllm.load.failed_after_s": {
            "value": 1.5,
            "unit": "s",
            "note": "vllm is not installed; model s",
        },
        "peers.quire.w1.output_tokens_per_s": {"value": 7.0, "unit": "tokens/s", "note": "model s"},
    }
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"], "nothing unfinished remains"


@pytest.mark.parametrize(
    ("mistake", "reason"),
    [
        (["--engines", "quire,turbo"], "unknown: turbo"),
        (["--workloads", "w9"], "unknown: w9"),
        (["--tensor-parallel-size", "2", "--engines", "quire,llama.cpp"], "run on one rank only: llama.cpp"),
    ],
)
def test_wrong_options_are_refused(
    mistake: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["offline", *mistake])
    with pytest.raises(SystemExit):
        offline.parse_arguments()
    assert reason in capsys.readouterr().err
