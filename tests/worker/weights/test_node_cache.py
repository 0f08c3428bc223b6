"""NodeCache copies weights once, checks and evicts the copies, and never fails a load."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.proto.errors import ConfigError
from quire.worker.weights import node_cache
from quire.worker.weights.node_cache import CHECKSUMS, IN_USE_S, NodeCache
from quire.worker.weights.node_copy import PIECES

WEIGHTS = {"model-00001-of-00002.safetensors": b"a" * 3000, "model-00002-of-00002.safetensors": b"b" * 2000}
INDEX = {"model.safetensors.index.json": b"{}"}
NUM_BYTES = 5002


@pytest.fixture(autouse=True)
def other_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the cache and the sources appear to be on two disks."""
    monkeypatch.setattr(node_cache, "_device_of", lambda path: 1 if "cache" in path.parts else 2)


def model(tmp_path: Path, name: str = "model") -> Path:
    folder = tmp_path / "store" / name
    folder.mkdir(parents=True)
    for file, content in {**WEIGHTS, **INDEX, "config.json": b"{}", "model.py": b""}.items():
        (folder / file).write_bytes(content)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> NodeCache:
    return NodeCache(tmp_path / "cache")


def age(copy: Path, seconds: float) -> None:
    """Let the copy have been used that long ago."""
    os.utime(copy / CHECKSUMS, (time.time() - seconds,) * 2)


def test_copy_has_the_weights_and_their_checksums(cache: NodeCache, tmp_path: Path) -> None:
    copy = cache.copy_of(model(tmp_path))
    assert copy.parent == cache.folder
    assert {path.name for path in copy.iterdir()} == {*WEIGHTS, *INDEX, CHECKSUMS, PIECES}
    for name, content in WEIGHTS.items():
        assert (copy / name).read_bytes() == content
    digests = {
        f"{hashlib.sha256(content).hexdigest()}  {name}" for name, content in {**WEIGHTS, **INDEX}.items()
    }
    assert set((copy / CHECKSUMS).read_text().splitlines()) == digests


def test_second_load_reads_the_copy_only(cache: NodeCache, tmp_path: Path) -> None:
    source = model(tmp_path)
    copy = cache.copy_of(source)
    age(copy, 500)
    files = {path: path.stat().st_ino for path in copy.iterdir()}
    assert cache.copy_of(source) == copy
    assert {path: path.stat().st_ino for path in copy.iterdir()} == files
    assert time.time() - (copy / CHECKSUMS).stat().st_mtime < 100


def test_processes_that_load_at_once_copy_once(
    cache: NodeCache, tmp_path: Path, log_of: Callable[[str], list[str]]
) -> None:
    source, all_wait, logged = model(tmp_path), threading.Barrier(3), log_of(node_cache.__name__)

    def load() -> Path:
        all_wait.wait(60)
        return cache.copy_of(source)

    with ThreadPoolExecutor(3) as processes:
        copies = {future.result(60) for future in [processes.submit(load) for _ in range(3)]}
    assert len(copies) == 1
    assert ["once on this node" in line for line in logged] == [True, False], "copying, and copied"


def test_changed_weights_are_copied_again(cache: NodeCache, tmp_path: Path) -> None:
    source = model(tmp_path)
    first = cache.copy_of(source)
    (source / "model-00001-of-00002.safetensors").write_bytes(b"c" * 3000)
    os.utime(source / "model-00001-of-00002.safetensors", (1, 1))
    second = cache.copy_of(source)
    assert second != first
    assert (second / "model-00001-of-00002.safetensors").read_bytes() == b"c" * 3000


def test_least_recently_used_copy_is_evicted(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path / "cache", max_bytes=2 * NUM_BYTES + 1000)
    old, older = (cache.copy_of(model(tmp_path, name)) for name in ("old", "older"))
    age(old, IN_USE_S + 10)
    age(older, IN_USE_S + 20)
    new = cache.copy_of(model(tmp_path, "new"))
    assert new.is_dir()
    assert old.is_dir()
    assert not older.exists()


def test_copy_in_use_is_not_evicted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = NodeCache(tmp_path / "cache", max_bytes=NUM_BYTES + 1000)
    used = cache.copy_of(model(tmp_path, "used"))
    source = model(tmp_path, "new")
    with caplog.at_level(logging.WARNING):
        assert cache.copy_of(source) == source
    assert used.is_dir()
    assert "GB are needed" in caplog.text


def test_damaged_copy_is_dropped_and_the_source_is_read(
    cache: NodeCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def damage(fd: int, *arguments: int) -> None:
        os.pwrite(fd, b"x", 1)

    monkeypatch.setattr(os, "posix_fadvise", damage)
    source = model(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert cache.copy_of(source) == source
    assert "differs on the disk" in caplog.text
    assert cache._copies() == []


def test_remains_of_a_killed_process_are_deleted(cache: NodeCache, tmp_path: Path) -> None:
    source = model(tmp_path)
    copy = cache.copy_of(source)
    copy.rename(copy.with_name(f".{copy.name}.incoming"))
    other = cache.folder / ".other-0123456789abcdef.incoming"
    other.mkdir()
    assert cache.copy_of(source) == copy
    assert (copy / CHECKSUMS).is_file()
    assert not other.exists()


def test_folder_that_cannot_be_made_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file")
    source = model(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert NodeCache(tmp_path / "cache").copy_of(source) == source
    assert "is read in place" in caplog.text


def test_weights_on_the_same_disk_are_not_copied(tmp_path: Path) -> None:
    source = model(tmp_path)
    assert NodeCache(tmp_path / "beside").copy_of(source) == source


@pytest.mark.parametrize("size", ["0", "-1", "many", "nan", "inf"])
def test_size_must_be_a_positive_number(size: str) -> None:
    with pytest.raises(ConfigError, match="QUIRE_WEIGHTS_CACHE_GB is"):
        NodeCache.of_environment({"QUIRE_WEIGHTS_CACHE": "/x", "QUIRE_WEIGHTS_CACHE_GB": size})


def test_environment_without_a_folder_has_no_cache() -> None:
    assert NodeCache.of_environment({"QUIRE_WEIGHTS_CACHE_GB": "1"}) is None
    cache = NodeCache.of_environment({"QUIRE_WEIGHTS_CACHE": "/x", "QUIRE_WEIGHTS_CACHE_GB": "1.5"})
    assert cache == NodeCache(Path("/x"), 1_500_000_000)


def test_model_loads_from_the_copy(
    make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, params = make_model("llama"), SamplingParams(max_tokens=4, temperature=0.0)
    monkeypatch.setenv("QUIRE_WEIGHTS_CACHE", str(tmp_path / "cache"))
    outputs = []
    for _ in range(2):
        with LLM(model=str(directory), device="cpu", num_kv_blocks=16) as llm:
            outputs.append(llm.generate(["one two"], params)[0].outputs[0].token_ids)
        (copy,) = NodeCache(tmp_path / "cache")._copies()
        weights = next(copy.glob("*.safetensors"))
        assert weights.read_bytes() == (directory / weights.name).read_bytes()
    assert outputs[0] == outputs[1]


def test_piece_is_found_while_its_copy_is_renamed(
    tmp_path: Path, cache: NodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = cache.copy_of(model(tmp_path))
    incoming = copy.rename(copy.with_name(f".{copy.name}.incoming"))
    glob = Path.glob

    def rename_after(folder: Path, pattern: str) -> list[Path]:
        found = list(glob(folder, pattern))
        if folder == cache.folder and incoming.exists():
            incoming.rename(copy)
        return found

    monkeypatch.setattr(Path, "glob", rename_after)
    assert cache.read_piece(copy.name.rpartition("-")[2], 0) is not None
