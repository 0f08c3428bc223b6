"""Planner and the commands `quire simulate` and `quire plan`, on a small model's configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cluster.cli import app
from quire.cluster.config.deployment import ScalingLimits
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.simulation import planner as planner_module
from quire.cluster.simulation.engine import make_engine
from quire.cluster.simulation.planner import Candidate, Planner
from quire.cluster.simulation.run import Targets, run_trace
from quire.cluster.simulation.traces import TracedRequest
from quire.proto.errors import ConfigError

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama-8b")
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder


def trace(count: int, apart_s: float, num_prompt: int = 500, num_output: int = 20) -> list[TracedRequest]:
    return [TracedRequest(number, number * apart_s, num_prompt, num_output) for number in range(count)]


def write_trace(path: Path, requests: list[TracedRequest]) -> Path:
    rows = (f"{each.arrival_s},{each.num_prompt_tokens},{each.num_output_tokens}\n" for each in requests)
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(rows))
    return path


def test_engine_has_the_memory_and_speed_of_its_device(model_dir: Path) -> None:
    small, large = (make_engine(EngineOptions(str(model_dir)), gpu) for gpu in ("l4", "h200"))
    assert small.num_kv_tokens < large.num_kv_tokens
    assert small.config.scheduler.max_num_seqs == 64
    assert small.step_time.cost == large.step_time.cost
    # 8.03 billion parameters, of which 0.53 are the table of embeddings.
    assert large.step_time.cost.flops_per_token == pytest.approx(2 * 7.505e9, rel=0.001)
    assert large.step_time.cost.weight_bytes == pytest.approx(2 * 7.505e9, rel=0.001)
    assert large.step_time.cost.kv_bytes_per_token == 2 * 2 * 32 * 8 * 128
    halves = make_engine(EngineOptions(str(model_dir), tensor_parallel_size=2), "h200")
    assert halves.step_time.cost.weight_bytes == large.step_time.cost.weight_bytes / 2
    assert halves.step_time.cost.num_all_reduces == 64


def test_model_that_does_not_fit_is_refused(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="does not fit on 1 x 23 GiB"):
        make_engine(EngineOptions(str(model_dir), gpu_memory_utilization=0.5), "l4")
    with pytest.raises(ConfigError, match="gpu is 'abacus', must be one of h200"):
        make_engine(EngineOptions(str(model_dir)), "abacus")


def test_run_reports_each_request_once(model_dir: Path) -> None:
    engine = make_engine(EngineOptions(str(model_dir)), "h100")
    figures = run_trace(engine, trace(30, 0.05), ScalingLimits()).figures()
    assert (figures["requests"], figures["errors"]) == (30, {})
    assert figures["ttft_s"]["count"] == 30
    assert figures["itl_s"]["count"] == 30 * 19
    assert figures["gpu_hours"] == pytest.approx(figures["seconds"] / 3600)


def test_autoscaled_fleet_grows_and_loses_no_request(model_dir: Path) -> None:
    engine = make_engine(EngineOptions(str(model_dir)), "l4")
    limits = ScalingLimits(
        max_replicas=4, cold_start_s=5.0, down_delay_s=20.0, cooldown_s=2.0, target_wait_s=2.0
    )
    requests = trace(200, 0.1, num_prompt=2000, num_output=10)
    requests += [TracedRequest(200 + n, 40.0 + n, 100, 5) for n in range(60)]
    run = run_trace(engine, requests, limits)
    assert run.summary.num_ended == 260
    assert run.summary.errors == {}
    assert run.cost.most_replicas > 1
    started = [replicas for _, replicas, _ in run.cost.history]
    assert started[-2] < max(started), "the fleet shrinks again when the load is gone"


def test_planner_finds_the_cheapest_that_meets_the_targets(model_dir: Path) -> None:
    seen: list[Candidate] = []
    planner = Planner(
        EngineOptions(str(model_dir)), trace(60, 0.1), Targets(ttft_s=0.5, itl_s=0.05),
        {"l4": 0.7, "h100": 2.9}, ScalingLimits(max_replicas=2), shares_prefixes=False, on_candidate=seen.append,
    )  # fmt: skip
    best = planner.plan()
    assert best is not None
    assert best.run is not None
    assert seen == planner.tried
    assert best.run.summary.ttft.quantile(0.99) <= 0.5
    assert best.run.summary.itl.quantile(0.99) <= 0.05
    serving = [each for each in planner.tried if not each.problem]
    assert best.cost_per_hour == min(each.cost_per_hour for each in serving)
    assert any(each.problem for each in planner.tried if each.gpu == "l4")


def test_planner_tries_fewer_replicas_of_two_roles(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_module, "TENSOR_PARALLEL_SIZES", (1,))
    monkeypatch.setattr(planner_module, "CHUNKS", (8192,))
    planner = Planner(
        EngineOptions(str(model_dir)),
        trace(60, 0.05, num_prompt=4000, num_output=4),
        Targets(ttft_s=0.4),
        {"h100": 2.9},
        ScalingLimits(max_replicas=4),
        shares_prefixes=False,
    )
    best = planner.plan()
    assert best is not None
    split = [each for each in planner.tried if each.prefill is not None]
    assert {each.num_least for each in split} == {best.limits.min_replicas - 1}
    (first, *_) = split
    assert first.figures()["prefill_replicas"] == 1
    assert first.replicas == f"{first.num_least - 1}+1"


def test_planner_has_no_answer_to_impossible_targets(model_dir: Path) -> None:
    planner = Planner(
        EngineOptions(str(model_dir)),
        trace(20, 0.1),
        Targets(itl_s=1e-4),
        {"l4": 0.7},
        ScalingLimits(max_replicas=1),
    )
    assert planner.plan() is None
    assert all(each.problem for each in planner.tried)


def test_simulate_command_writes_its_figures(model_dir: Path, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.csv", trace(10, 0.1))
    command = ["simulate", str(path), "--model", str(model_dir), "--gpu", "h200", "--max-replicas", "2"]
    result = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "run.json")])
    assert result.exit_code == 0, result.output
    assert "is assumed" in result.output
    assert json.loads((tmp_path / "run.json").read_text())["requests"] == 10


def test_plan_command_names_the_options_and_draws_them(model_dir: Path, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.csv", trace(30, 0.1))
    prices = tmp_path / "prices.json"
    prices.write_text('{"h100": 3.0}')
    command = ["plan", str(path), "--model", str(model_dir), "--ttft-p99", "1", "--max-replicas", "2"]
    output = ["--json", str(tmp_path / "plan.json"), "--svg", str(tmp_path / "plan.svg")]
    result = CliRunner().invoke(app, [*command, "--prices", str(prices), *output])
    assert result.exit_code == 0, result.output
    assert "--tensor-parallel-size 1" in result.output
    assert json.loads((tmp_path / "plan.json").read_text())["best"]["cost_per_hour"] == pytest.approx(3.0)
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")
    lines = result.output.splitlines()
    assert max(len(line) for line in lines if line[:1] in "│┃┏└") <= 80
    assert sum("│ costs more" in line for line in lines) == sum("│" in line for line in lines) - 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ([], "give a target"),
        (["--ttft-p99", "1", "--block-size", "32"], "the planner chooses these"),
        (["--ttft-p99", "1", "--gpu", "abacus"], "abacus"),
    ],
)
def test_plan_command_refuses_what_it_cannot_do(
    model_dir: Path, tmp_path: Path, options: list[str], problem: str
) -> None:
    path = write_trace(tmp_path / "trace.csv", trace(3, 0.1))
    result = CliRunner().invoke(app, ["plan", str(path), "--model", str(model_dir), *options])
    assert result.exit_code != 0
    assert problem in result.output + str(result.exception)
