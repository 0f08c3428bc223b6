"""Deployments from fleet files, tables, JSON and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cluster.cli import app
from quire.cluster.cli.deploy import read_deployments
from quire.cluster.config.deployment import Deployment, read_fleet_file
from quire.proto.errors import ConfigError

FILE = """
[[model]]
model = "demo"
tensor_parallel_size = 2
kv_cache_memory = "512MiB"
min_replicas = 0
max_replicas = 4
target_wait_s = 2
policy = "fair"
tenant_weights = { gold = 3, silver = 1.5 }

[[model]]
model = "demo"
served_model_name = "small"
rank_resources = { GPU = 1 }
"""


def test_fleet_file_holds_several_models(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(FILE)
    first, second = read_fleet_file(path)
    assert (first.name, second.name) == ("demo", "small")
    assert first.engine.tensor_parallel_size == 2
    assert first.engine.kv_cache_memory == 512 << 20
    assert first.engine.tenant_weights == (("gold", 3.0), ("silver", 1.5))
    assert (first.limits.min_replicas, first.limits.max_replicas, first.limits.target_wait_s) == (0, 4, 2.0)
    assert second.rank_resources == (("GPU", 1.0),)
    assert read_deployments(str(path), {}) == (first, second)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = 1", r"must hold \[\[model\]\] tables"),
        ("[[model]]\n", "must be a table with `model`"),
        ("[[models]]\nmodel='demo'", r"must hold \[\[model\]\] tables"),
        ("[[model]]\nmodel='demo'\n[other]\n", r"must hold \[\[model\]\] tables"),
        ("[[model]]\nmodel='demo'\ntensor_parallel=2", "did you mean 'tensor_parallel_size'"),
        ("[[model]]\nmodel='demo'\nmax_num_seqs='many'", "max_num_seqs is 'many', must be a whole number"),
        ("[[model]]\nmodel='demo'\nmax_num_seqs=true", "max_num_seqs is True, must be a whole number"),
        ("[[model]]\nmodel='demo'\nmax_model_len=1.5", "max_model_len is 1.5, must be a whole number"),
        ("[[model]]\nmodel='demo'\nprefix_caching=1", "prefix_caching is 1, must be true or false"),
        ("[[model]]\nmodel='demo'\nmin_replicas=3", "max_replicas is 1"),
        ("[[model]]\nmodel='demo'\nrank_resources={GPU='x'}", "must be a table of names and numbers"),
        ("[[model]]\nmodel='demo'\nrank_resources={GPU=0}", "rank_resources has 0 for 'GPU'"),
        ("[[model]]\nmodel='demo'\ndrain_grace_s=-1", "drain_grace_s is -1"),
        ("[[model]]\nmodel='demo'\n[[model]]\nmodel='demo'", "has demo twice"),
        ("[[model]", "fleet.toml: "),
    ],
)
def test_bad_fleet_file_raises_config_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_fleet_file(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_fleet_file(tmp_path / "missing.toml")


def test_deployment_round_trips_through_json() -> None:
    table = {"model": "demo", "tenant_weights": {"gold": 3}, "policy": "fair", "rank_resources": {"GPU": 1}}
    deployment = Deployment.from_table(table | {"max_replicas": 3, "weights_version": "x"})
    assert Deployment.from_json(deployment.to_json()) == deployment
    assert Deployment.from_json(json.dumps(deployment.to_table())).version == deployment.version
    for text in ("", "[]", "{}", '{"model": 3}', "null"):
        with pytest.raises(ConfigError):
            Deployment.from_json(text)


@pytest.mark.parametrize(
    ("options", "is_another"),
    [
        ({"max_num_seqs": 8}, True),
        ({"rank_resources": {"GPU": 2}}, True),
        ({"weights_version": "2"}, True),
        ({"max_replicas": 9}, False),
        ({"drain_grace_s": 5.0}, False),
    ],
)
def test_version_changes_with_engine_options_resources_and_weights_version(
    options: dict[str, Any], is_another: bool
) -> None:
    version = Deployment.from_table({"model": "demo"}).version
    assert (Deployment.from_table({"model": "demo", **options}).version != version) == is_another


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "demo", "--min-replicas", "2"], "min_replicas: only a fleet has these"),
        (["serve", "fleet.toml"], "a fleet file needs a Ray cluster"),
        (
            ["deploy", "fleet.toml", "--tensor-parallel-size", "2"],
            "options of models stand in the fleet file",
        ),
    ],
)
def test_options_in_the_wrong_place_are_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0
    assert message in " ".join(result.output.replace("│", " ").split())


def test_deployment_with_roles_has_a_part_for_each() -> None:
    deployment = Deployment.from_table(
        {
            "model": "demo", "tensor_parallel_size": 2, "prefill_replicas": 1, "max_prefill_replicas": 3,
            "decode_replicas": 2, "prefill_tensor_parallel_size": 4,
        }
    )  # fmt: skip
    prefill, decode = deployment.parts
    assert (prefill.engine.role, decode.engine.role) == ("prefill", "decode")
    assert (prefill.engine.tensor_parallel_size, decode.engine.tensor_parallel_size) == (4, 2)
    assert (prefill.limits.min_replicas, prefill.limits.max_replicas) == (1, 3)
    assert (decode.limits.min_replicas, decode.limits.max_replicas) == (2, 2)
    assert (deployment.min_replicas, deployment.max_replicas) == (3, 5)
    assert prefill.parts == (prefill,)
    assert len({deployment.version, prefill.version, decode.version}) == 3
    assert Deployment.from_json(deployment.to_json()) == deployment


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_replicas": 4, "max_prefill_replicas": 2}, "max_prefill_replicas is 2, must be at least"),
        ({"decode_replicas": 1, "role": "decode"}, "role is decode, must be both with prefill_replicas"),
        ({"role": "other"}, "role is 'other', must be"),
    ],
)
def test_roles_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Deployment.from_table({"model": "demo"} | options)
