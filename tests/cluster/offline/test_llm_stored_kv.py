"""LLM with --kv-disk and --kv-shared: another process finds the prefixes; damaged or foreign blocks are computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.cluster.offline.in_process import InProcessEngine
from quire.proto.errors import ConfigError
from quire.scheduler.kv.stored_tier import StoredTier

pytestmark = pytest.mark.usefixtures("patient_reads", "state_home")

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = [3 + (7 * place) % 90 for place in range(61)]
# Full blocks of 4 tokens that a second run of PROMPT can use: all but the last token.
NUM_CACHED = 60


def open_llm(model_dir: Path, place: Path, **options: Any) -> LLM:
    settings = {"block_size": 4, "num_kv_blocks": 256, "max_num_seqs": 4, "audit": True} | options
    if "kv_shared" not in settings:
        settings["kv_disk"] = f"{place}:64MiB"
    return LLM(str(model_dir), device="cpu", dtype="float32", **settings)


def stored_of(llm: LLM) -> StoredTier:
    assert isinstance(llm._engine, InProcessEngine)
    return llm._engine.scheduler.blocks.stored


def run(llm: LLM, prompt: list[int] | None = None) -> tuple[list[int], int]:
    """Return the output of a prompt and its cached tokens."""
    (result,) = llm.generate([prompt or PROMPT], GREEDY)
    return list(result.outputs[0].token_ids), result.num_cached_tokens or 0


@pytest.fixture
def stored(model_dir: Path, tmp_path: Path) -> tuple[Path, list[int]]:
    """A directory with the blocks of PROMPT, and its output."""
    with open_llm(model_dir, tmp_path / "kv") as llm:
        output, num_cached = run(llm)
        assert num_cached == 0
    return tmp_path / "kv", output


def files_in(place: Path) -> list[Path]:
    return sorted(place.glob("quire-kv/*/*.kv"))


def test_another_engine_starts_with_the_stored_prefix(
    model_dir: Path, stored: tuple[Path, list[int]]
) -> None:
    place, output = stored
    assert files_in(place)
    with open_llm(model_dir, place) as llm:
        assert run(llm) == (output, NUM_CACHED)
        assert stored_of(llm).num_hit_tokens == NUM_CACHED
        assert run(llm) == (output, NUM_CACHED)  # from the device
        assert stored_of(llm).num_hit_tokens == NUM_CACHED


def test_two_engines_share_a_directory(model_dir: Path, tmp_path: Path) -> None:
    shared = f"{tmp_path / 'kv'}:64MiB"
    with open_llm(model_dir, tmp_path, kv_shared=shared) as first:
        output, _ = run(first)
    with (
        open_llm(model_dir, tmp_path, kv_shared=shared) as second,
        open_llm(model_dir, tmp_path, kv_shared=shared) as third,
    ):
        for llm in (second, third):
            assert run(llm) == (output, NUM_CACHED)


def test_small_files_are_joined(model_dir: Path, stored: tuple[Path, list[int]]) -> None:
    place, _ = stored
    with open_llm(model_dir, place) as llm:
        for seed in (11, 13, 17):
            run(llm, [3 + (seed * index) % 90 for index in range(40)])
            assert isinstance(llm._engine, InProcessEngine)
            llm._engine._settle(60.0)
        assert len(files_in(place)) == 2  # that of the engine before, and this one's
        assert stored_of(llm).num_blocks_in[0] >= 40


def flip_a_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_corrupt_block_is_computed(model_dir: Path, stored: tuple[Path, list[int]]) -> None:
    place, output = stored
    (path,) = files_in(place)
    flip_a_byte(path, (4096 + path.stat().st_size) // 2)
    with open_llm(model_dir, place) as llm:
        found, num_cached = run(llm)
        assert found == output
        assert num_cached < NUM_CACHED
        assert stored_of(llm).num_corrupt_blocks == 1


def test_file_that_vanishes_is_a_miss(model_dir: Path, stored: tuple[Path, list[int]]) -> None:
    place, output = stored
    with open_llm(model_dir, place) as llm:
        assert stored_of(llm).num_blocks_in[0] > 0
        for path in files_in(place):
            path.unlink()
        assert run(llm) == (output, 0)
        assert stored_of(llm).num_failed_reads > 0


@pytest.mark.parametrize("change", ["key", "list", "salt", "dtype"])
def test_blocks_of_others_are_not_found(
    change: str, model_dir: Path, stored: tuple[Path, list[int]], state_home: Path
) -> None:
    place, output = stored
    options: dict[str, Any] = {}
    if change == "key":
        (state_home / "quire" / "kv.key").write_bytes(bytes(32))
    if change == "list":
        flip_a_byte(files_in(place)[0], 40)
    if change == "dtype":
        options["kv_cache_dtype"] = "int8"
    with open_llm(model_dir, place, **options) as llm:
        if change == "salt":
            (result,) = llm.generate([PROMPT], GREEDY, cache_salt="other")
            assert result.num_cached_tokens == 0
            return
        found, num_cached = run(llm)
        assert num_cached == 0
        assert found == output or change == "dtype"


@pytest.mark.parametrize(
    ("prepare", "problem"),
    [
        (lambda place, key: place.write_text("a file"), "KV cannot be kept in"),
        (lambda place, key: (place / "quire-kv").mkdir(parents=True, mode=0o755), "is open to other users"),
        (lambda place, key: key.chmod(0o644), "may be read or changed by other users"),
        (lambda place, key: key.write_bytes(b"short"), "must have 32 random ones"),
    ],
)
def test_unusable_directory_or_key_is_refused(
    prepare: Callable[[Path, Path], object], problem: str, model_dir: Path, tmp_path: Path
) -> None:
    place, key = tmp_path / "kv", tmp_path / "key"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    prepare(place, key)
    with pytest.raises(ConfigError, match=problem):
        open_llm(model_dir, place, kv_key=str(key))


def test_directory_of_another_version_is_refused(model_dir: Path, stored: tuple[Path, list[int]]) -> None:
    place, _ = stored
    (place / "quire-kv" / "version").write_text("9\n")
    with pytest.raises(ConfigError, match="version '9', must be 2"):
        open_llm(model_dir, place)


def test_another_engine_finds_prefixes_in_a_bucket(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boto3, server = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    store = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    store.start()
    host, port = store.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    try:
        boto3.client("s3").create_bucket(Bucket="kv-offline")
        with open_llm(model_dir, tmp_path, kv_shared="s3://kv-offline/of/tests:64MiB") as llm:
            output, _ = run(llm)
        with open_llm(model_dir, tmp_path, kv_shared="s3://kv-offline/of/tests:64MiB") as llm:
            assert run(llm) == (output, NUM_CACHED)
    finally:
        store.stop()
