"""Downloads from a server on loopback that speaks the hub's HTTP."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import COMMIT, HubServer, hub_of_this_process
from huggingface_hub import constants

from quire.cluster.config.hub import download_model, find_commit, is_model_id
from quire.proto.errors import ModelLoadError

MODEL = "org/tiny"
WEIGHTS = os.urandom(200_000)
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
    "consolidated.safetensors": b"the same weights under other names",
    "modeling_tiny.py": b"raise SystemExit",
    "pytorch_model.bin": b"a pickle",
    "onnx/model.safetensors": b"another format",
    "2_Dense/model.safetensors": b"a layer of an embedder",
}
WANTED = {
    "2_Dense/model.safetensors",
    "config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "model.safetensors",
}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    folder = tmp_path / "published"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    with hub_of_this_process({MODEL: folder}, tmp_path / "cache") as server:
        yield server


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Qwen/Qwen3-8B", True), ("a/b", True), ("demo", False), ("/models/x", False), ("a/b/c", False), ("./x", False)],
)  # fmt: skip
def test_model_id_has_an_organization_and_a_name(text: str, expected: bool) -> None:
    assert is_model_id(text) is expected


def test_download_takes_allowed_files_only(hub: HubServer) -> None:
    snapshot = download_model(MODEL)
    files = (path.relative_to(snapshot.path) for path in snapshot.path.rglob("*") if not path.is_dir())
    assert set(map(str, files)) == WANTED
    assert (snapshot.path / "model.safetensors").read_bytes() == WEIGHTS
    assert snapshot.commit == COMMIT
    assert set(hub.num_gets) == WANTED


def test_second_download_takes_nothing(hub: HubServer) -> None:
    first = download_model(MODEL)
    hub.num_gets.clear()
    assert download_model(MODEL, "main") == first
    assert not hub.num_gets


def test_download_without_weights_leaves_them_to_a_later_one(hub: HubServer) -> None:
    snapshot = download_model(MODEL, with_weights=False)
    assert not (snapshot.path / "model.safetensors").exists()
    assert (download_model(MODEL).path / "model.safetensors").read_bytes() == WEIGHTS


def test_interrupted_download_is_resumed(hub: HubServer) -> None:
    hub.interrupt["model.safetensors"] = 2
    assert (download_model(MODEL).path / "model.safetensors").read_bytes() == WEIGHTS


def test_corrupt_download_is_repeated(hub: HubServer, caplog: pytest.LogCaptureFixture) -> None:
    hub.corrupt["model.safetensors"] = 1
    with caplog.at_level(logging.WARNING):
        snapshot = download_model(MODEL)
    assert (snapshot.path / "model.safetensors").read_bytes() == WEIGHTS
    assert "download 1 of model.safetensors is corrupt" in caplog.text


def test_download_that_stays_corrupt_is_refused_and_deleted(hub: HubServer) -> None:
    hub.corrupt["model.safetensors"] = 2
    with pytest.raises(ModelLoadError, match=r"org/tiny: model\.safetensors had another SHA-256"):
        download_model(MODEL)
    assert (download_model(MODEL).path / "model.safetensors").read_bytes() == WEIGHTS


def test_cached_model_needs_no_server(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = download_model(MODEL)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert download_model(MODEL) == expected
    assert find_commit(MODEL, None) == COMMIT


def test_offline_download_of_a_missing_model_says_so(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match=r"not completely in the cache .*, and HF_HUB_OFFLINE is set"):
        download_model(MODEL)


def test_partial_snapshot_is_refused_offline(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    download_model(MODEL, with_weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="not completely in the cache"):
        download_model(MODEL)


@pytest.mark.parametrize(
    ("model", "revision", "problem"),
    [
        ("org/other", None, r"org/other: is not on http://127\.0\.0\.1"),
        (MODEL, "v9", r"org/tiny at revision v9: the model has no such revision"),
    ],
)
def test_unknown_model_or_revision_is_named(
    hub: HubServer, model: str, revision: str | None, problem: str
) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        download_model(model, revision)


def test_gated_model_needs_a_token(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add(MODEL)
    with pytest.raises(ModelLoadError, match="is gated; accept its terms"):
        download_model(MODEL)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert download_model(MODEL).commit == COMMIT


def test_full_disk_is_refused_before_the_download(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ModelLoadError, match=r"needs 0\.0 GB in .*cache, where 0\.0 GB are free"):
        download_model(MODEL)
    assert not hub.num_gets


def test_commit_of_a_branch_is_found_without_weights(hub: HubServer) -> None:
    assert find_commit(MODEL, "main") == COMMIT
    assert find_commit(MODEL, COMMIT) == COMMIT
    assert "model.safetensors" not in hub.num_gets
