"""LLM of a model that keeps states with --kv-disk: another engine starts from stored snapshots, or computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_kinds import model_type_of
from state_kinds import STATE_KINDS

from quire import LLM, SamplingParams
from quire.cluster.offline.in_process import InProcessEngine
from quire.scheduler.kv.stored_tier import StoredTier

pytestmark = pytest.mark.usefixtures("patient_reads", "state_home")

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = [3 + (7 * place) % 90 for place in range(61)]
# The prompt's last whole block, after which its state is saved: the last token is always computed.
NUM_CACHED = 60
# Without keys and values, with convolutions, and with latents.
KINDS = ["mamba", "lfm2", "kimi_linear"]


@pytest.fixture(scope="module")
def folders(make_model: Callable[..., Path]) -> Callable[[str], Path]:
    return lambda kind: make_model(model_type_of(kind), seed=7, **STATE_KINDS[kind])


def open_llm(folder: Path, place: Path, **options: Any) -> LLM:
    options = {"kv_cache_memory": 8 << 20, "max_num_seqs": 4, "block_size": 4, "max_model_len": 128} | options
    kv_disk = f"{place}:64MiB"
    return LLM(str(folder), device="cpu", dtype="float32", kv_disk=kv_disk, audit=True, **options)


def run(llm: LLM) -> tuple[list[int], int]:
    """Return the output of PROMPT and its cached tokens."""
    (result,) = llm.generate([PROMPT], GREEDY)
    return list(result.outputs[0].token_ids), result.num_cached_tokens or 0


def stored_of(llm: LLM) -> StoredTier:
    assert isinstance(llm._engine, InProcessEngine)
    return llm._engine.scheduler.blocks.stored


def files_of_states(place: Path) -> list[Path]:
    """Return the files of states, which are those written last: they follow the blocks in each order."""
    return sorted(place.glob("quire-kv/*/*.kv"), key=lambda path: path.stat().st_mtime_ns)[1:]


@pytest.fixture
def store(folders: Callable[[str], Path], tmp_path: Path) -> Callable[[str], tuple[Path, Path, list[int]]]:
    """Return the model, the directory that it has stored PROMPT in, and its output."""

    def run_first(kind: str) -> tuple[Path, Path, list[int]]:
        folder, place = folders(kind), tmp_path / "kv"
        with open_llm(folder, place) as llm:
            output, num_cached = run(llm)
            assert num_cached == 0
        return folder, place, output

    return run_first


@pytest.mark.parametrize("kind", KINDS)
def test_another_engine_starts_from_the_stored_snapshot(
    kind: str, store: Callable[[str], tuple[Path, Path, list[int]]]
) -> None:
    folder, place, output = store(kind)
    with open_llm(folder, place) as llm:
        assert run(llm) == (output, NUM_CACHED)
        assert stored_of(llm).num_hit_tokens == NUM_CACHED
        assert run(llm) == (output, NUM_CACHED)


def test_torn_snapshot_is_computed(store: Callable[[str], tuple[Path, Path, list[int]]]) -> None:
    folder, place, output = store("lfm2")
    (path,) = files_of_states(place)
    with path.open("r+b") as file:
        file.seek(-1, 2)
        byte = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([byte[0] ^ 1]))
    with open_llm(folder, place) as llm:
        found, num_cached = run(llm)
        assert found == output
        assert num_cached == 0
        assert stored_of(llm).num_corrupt_blocks == 1


def test_states_of_another_dtype_are_not_found(
    store: Callable[[str], tuple[Path, Path, list[int]]],
) -> None:
    folder, place, _ = store("mamba")
    with open_llm(folder, place, mamba_ssm_cache_dtype="bfloat16") as llm:
        assert run(llm)[1] == 0
        assert stored_of(llm).num_read_blocks == 0
