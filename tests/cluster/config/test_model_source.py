"""Models on the hub: their name, their files, and the commit that a deployment is pinned to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_server import COMMIT, HubServer, hub_of_this_process

from quire import LLM, SamplingParams
from quire.cluster.config.deployment import Deployment
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.model_source import pin_revision
from quire.cluster.config.resolve import resolve, resolve_deployment
from quire.proto.errors import ConfigError, ModelLoadError

CPU = Machine(num_cores=2, num_gpus=0)
MODEL = "org/tiny-llama"


@pytest.fixture
def hub(make_model: Callable[..., Path], tmp_path: Path) -> Iterator[HubServer]:
    with hub_of_this_process({MODEL: make_model("llama")}, tmp_path / "cache") as server:
        yield server


def test_hub_model_is_named_by_its_id() -> None:
    assert EngineOptions(MODEL).name == MODEL
    assert EngineOptions(MODEL, served_model_name="tiny").name == "tiny"


def test_directory_wins_over_a_hub_model_of_the_same_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / MODEL).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert EngineOptions(MODEL).hub_id == ""
    assert EngineOptions(MODEL).name == "tiny-llama"


def test_hub_model_resolves_to_its_snapshot(hub: HubServer) -> None:
    model = resolve(EngineOptions(MODEL), CPU).model
    assert (model.hub_id, model.commit, model.name) == (MODEL, COMMIT, MODEL)
    assert (Path(model.path) / "model.safetensors").is_file()


def test_deployment_resolves_without_weights(hub: HubServer) -> None:
    model = resolve_deployment(Deployment(EngineOptions(MODEL)), has_gpus=False).model
    assert not list(Path(model.path).glob("*.safetensors"))
    assert (Path(model.path) / "tokenizer.json").is_file()


def test_llm_generates_from_a_hub_model(hub: HubServer, make_model: Callable[..., Path]) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=5)
    outputs = []
    for model in (MODEL, str(make_model("llama"))):
        with LLM(model, num_kv_blocks=16) as llm:
            outputs.append(llm.generate("The quick", sampling)[0].outputs[0].token_ids)
    assert outputs[0] == outputs[1]


def test_deployment_is_pinned_to_a_commit(hub: HubServer) -> None:
    pinned = pin_revision(Deployment(EngineOptions(MODEL, revision="main")))
    assert pinned.engine.revision == COMMIT
    assert pin_revision(pinned) == pinned


def test_moved_branch_makes_a_new_version(hub: HubServer) -> None:
    deployment = Deployment(EngineOptions(MODEL))
    before = pin_revision(deployment).version
    hub.commit = "f" * 40
    assert pin_revision(deployment).version != before


def test_unknown_hub_model_is_refused(hub: HubServer) -> None:
    with pytest.raises(ModelLoadError, match="org/other: is not on"):
        resolve(EngineOptions("org/other"), CPU)


def test_revision_of_a_directory_is_refused() -> None:
    with pytest.raises(ConfigError, match="revision is 'main', but demo is a directory"):
        resolve(EngineOptions("demo", revision="main"), CPU)
