"""Weights that a rank leaves to the process that replaces it: same bits, shared memory, and no stale ones."""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from weights_owner import digest_of, load_runner, logits_of, record_reads, weights_owner

from quire.kernels.native.library import is_available
from quire.proto.config import EngineConfig
from quire.proto.engine_command import Action, EngineCommand
from quire.proto.step import StepPlan
from quire.worker.comm.communicator import SingleRank
from quire.worker.memory.shared_segment import SegmentAddress, SharedSegment
from quire.worker.rank.runner import ModelRunner

pytestmark = pytest.mark.skipif(not is_available(), reason="there is no C++ compiler")

_MATRICES = ("proj.weight", "embed_tokens.weight", "lm_head.weight")

MakeModel = Callable[..., Path]
MakeConfig = Callable[..., EngineConfig]


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the garbage collection of each closed runner, of 0.4 s."""
    monkeypatch.setattr("quire.worker.rank.rank_memory.free_unused_memory", lambda device: None)


def mapped_kb(name: str, field: str) -> int:
    """Return a field of this process's largest mapping of a segment, in kB."""
    blocks = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    own = [re.search(rf"^{field}: +(\d+) kB$", block, re.MULTILINE) for block in blocks if name in block]
    return max(int(found[1]) for found in own if found is not None)


def uses(address: SegmentAddress) -> bool:
    """Return whether this process has a segment open or mapped, after a garbage collection."""
    gc.collect()
    open_files = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing
            open_files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return address.name in "".join(open_files) + Path("/proc/self/maps").read_text()


def carry_out(runner: ModelRunner, command: EngineCommand, step_id: int = 1) -> None:
    digest = runner.memory.rows.tables.digest
    assert runner.execute(StepPlan(step_id, 1, digest, command=command)).command_error == ""


@pytest.mark.parametrize(
    ("kind", "overrides", "settings"),
    [
        ("llama", {}, {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}, {"quantization": "int8"}),
        ("deepseek_v3", {}, {}),
        ("qwen3_moe", {}, {}),
        ("qwen3_moe", {}, {"quantization": "fp8"}),  # experts that keep their codes
    ],
)
def test_inherited_weights_give_the_same_logits_without_reading_a_matrix(
    make_model: MakeModel,
    engine_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    overrides: dict[str, object],
    settings: dict[str, object],
) -> None:
    config = engine_config(make_model(kind, **overrides), **settings)
    with closing(ModelRunner(config, SingleRank())) as plain, closing(load_runner(config)) as first:
        plain.allocate_cache(8)
        assert plain.weight_segments == ()
        names = record_reads(monkeypatch)
        with closing(load_runner(config, first.weight_segments)) as second:
            assert [own.name for own in second.weight_segments] == [own.name for own in first.weight_segments]
            assert not [name for name in names if name.endswith(_MATRICES)]
            assert digest_of(logits_of(plain)) == digest_of(logits_of(first)) == digest_of(logits_of(second))
            with closing(SharedSegment.open(first.weight_segments[0])) as segment:
                assert segment.is_sealed


def test_weights_outlive_a_killed_process_in_one_copy(
    make_model: MakeModel, engine_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = engine_config(make_model("llama", hidden_size=512, intermediate_size=1024))
    with weights_owner(config) as owner:
        (address,) = owner.addresses
        kept = SharedSegment.open(address)
        with closing(load_runner(config, owner.addresses)) as sharer:
            assert digest_of(logits_of(sharer)) == owner.digest
            # Pages that two processes map count half for each.
            assert mapped_kb(address.name, "Pss") < 0.75 * mapped_kb(address.name, "Rss")
        owner.process.send_signal(signal.SIGKILL)
        owner.process.wait()
        with caplog.at_level(logging.WARNING), closing(load_runner(config, owner.addresses)) as late:
            assert digest_of(logits_of(late)) == owner.digest
        assert "not mapping the weights of the rank that failed" in caplog.text
        with closing(load_runner(config, [kept.address])) as standby:
            assert digest_of(logits_of(standby)) == owner.digest
    kept.close()
    del sharer, late, standby
    assert not uses(address)


def test_stale_weights_are_not_mapped(
    make_model: MakeModel, engine_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(make_model("llama", seed=1), folder)
    config = engine_config(folder)
    with closing(load_runner(config)) as first:
        other_dtype = replace(config, model=replace(config.model, dtype="bfloat16"))
        with closing(load_runner(other_dtype, first.weight_segments)) as second:
            assert "weights with another settings" in caplog.text
            assert second.weight_segments[0].name != first.weight_segments[0].name
        shutil.copytree(make_model("llama", seed=2), folder, dirs_exist_ok=True)
        os.utime(folder / "model.safetensors", (1, 1))
        with closing(load_runner(config, first.weight_segments)) as second:
            assert "weights with another files" in caplog.text
            assert digest_of(logits_of(second)) != digest_of(logits_of(first))
            with closing(load_runner(config)) as expected:
                assert digest_of(logits_of(second)) == digest_of(logits_of(expected))


def test_segments_follow_updates_and_sleep(make_model: MakeModel, engine_config: MakeConfig) -> None:
    config = engine_config(make_model("llama", seed=1))
    other = make_model("llama", seed=2)
    with closing(load_runner(config)) as runner:
        (first,) = runner.weight_segments
        carry_out(runner, EngineCommand(Action.UPDATE_WEIGHTS, path=str(other), version="v"))
        (second,) = runner.weight_segments
        with pytest.raises(FileNotFoundError):
            SharedSegment.open(first)
        updated = replace(config, model=replace(config.model, path=str(other)))
        with closing(load_runner(updated, [second])) as standby:
            assert standby.weight_segments[0].name == second.name
            assert digest_of(logits_of(standby)) == digest_of(logits_of(runner))
        with closing(load_runner(config, [second])) as standby:
            assert standby.weight_segments[0].name != second.name
        carry_out(runner, EngineCommand(Action.SLEEP), 2)
        assert runner.weight_segments == ()
        del standby
        assert not uses(first)
        assert not uses(second)
        carry_out(runner, EngineCommand(Action.WAKE_UP), 3)
        assert len(runner.weight_segments) == 1
