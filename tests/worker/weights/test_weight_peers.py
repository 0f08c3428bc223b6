"""Weights of another replica's rank, copied from its process over the network, and every way back to the files."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quick_cases import slow_except
from weights_owner import Owner, digest_of, load_runner, logits_of, record_reads, weights_owner

from quire.kernels.native.library import is_available
from quire.proto.config import EngineConfig
from quire.worker.memory.shared_segment import SharedSegment
from quire.worker.rank import weight_peers
from quire.worker.rank.weight_peers import WeightServer, seconds_to_read
from quire.worker.transfer.messages import StreamOffer
from quire.worker.transfer.sealed_port import connect_stream
from quire.worker.weights import standby_weights
from quire.worker.weights.standby_weights import StandbyWeights
from quire.worker.weights.weight_source import WeightSource

pytestmark = pytest.mark.skipif(not is_available(), reason="there is no C++ compiler")

MakeModel = Callable[..., Path]
MakeConfig = Callable[..., EngineConfig]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Copy a small model in many parts, and skip the garbage collection of each closed runner."""
    monkeypatch.setattr(weight_peers, "CHUNK_BYTES", 4 << 10)
    monkeypatch.setattr(weight_peers, "SILENCE_S", 60.0)
    monkeypatch.setattr("quire.worker.rank.rank_memory.free_unused_memory", lambda device: None)
    caplog.set_level(logging.INFO)


@pytest.fixture
def config(make_model: MakeModel, engine_config: MakeConfig) -> EngineConfig:
    return engine_config(make_model("llama"))


def load_from(owner: Owner, config: EngineConfig) -> str:
    """Load with a process as the source, and return the digest of the logits."""
    with closing(load_runner(config, [owner.source])) as runner:
        return digest_of(logits_of(runner))


def test_copied_weights_give_the_same_logits_without_reading_a_matrix(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with weights_owner(config) as owner:
        names = record_reads(monkeypatch)
        assert load_from(owner, config) == owner.digest
        assert not [name for name in names if "proj" in name]
        assert "weights of the owner, at" in caplog.text


def test_copy_outlives_the_process_and_can_be_mapped(config: EngineConfig) -> None:
    with weights_owner(config) as owner, closing(load_runner(config, [owner.source])) as second:
        owner.process.kill()
        owner.process.wait()
        assert digest_of(logits_of(second)) == owner.digest
        assert second.weight_segments[0].num_bytes > 20 * weight_peers.CHUNK_BYTES
        with closing(load_runner(config, [WeightSource("second", second.weight_segments)])) as third:
            assert [each.name for each in third.weight_segments] == [
                each.name for each in second.weight_segments
            ]
            assert digest_of(logits_of(third)) == owner.digest


@pytest.mark.parametrize("num_chunks", slow_except([1], [0, 1, 3]))
def test_process_that_is_killed_in_the_middle_means_reading_the_files(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_chunks: int
) -> None:
    with weights_owner(config) as owner:
        fill, written = weight_peers._next_frame, list[int]()

        def kill_after(*arguments: Any) -> memoryview:
            if len(written) == num_chunks:
                owner.process.kill()
                owner.process.wait()
            written.append(1)
            frame = fill(*arguments)
            # What the killed process had sent before lies in the socket.
            if len(written) > num_chunks + 3:
                raise AssertionError("the process has ended, and its bytes go on")
            return frame

        monkeypatch.setattr(weight_peers, "_next_frame", kill_after)
        assert load_from(owner, config) == owner.digest
    assert "the weights of the owner are not copied" in caplog.text


def test_copy_that_is_slower_than_the_files_is_given_up(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_peers, "TRIAL_BYTES", 1)
    monkeypatch.setattr(weight_peers, "seconds_to_read", lambda folder, num_ranks: -1e9)
    with weights_owner(config) as owner:
        assert load_from(owner, config) == owner.digest
    assert "the copy would take" in caplog.text


def test_peer_that_sends_slowly_is_given_up(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = itertools.count(0.0, 10.0)  # each look at the clock takes ten
    monkeypatch.setattr(weight_peers, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(weight_peers, "seconds_to_read", lambda folder, num_ranks: 1.0)
    with weights_owner(config) as owner:
        assert load_from(owner, config) == owner.digest
    assert "are not copied: TimeoutError: the owner has sent" in caplog.text


def test_peer_that_hangs_is_given_up_and_named(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_peers, "SILENCE_S", 0.5)
    with weights_owner(config) as owner:
        owner.process.send_signal(signal.SIGSTOP)
        assert load_from(owner, config) == owner.digest
    assert "are not copied: TimeoutError: the owner has not sent" in caplog.text


def test_few_peers_may_fail_before_the_files_are_read(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    asked = list[str]()
    sources = [WeightSource(f"peer {number}", (), "nowhere", 1, ((b"t", b"k"),)) for number in range(5)]
    standby = StandbyWeights(sources, copy=lambda source, identity, folder: asked.append(source.owner))
    with standby.store(Path(config.model.path), "settings"):
        pass
    standby.drop()
    assert asked == ["peer 0", "peer 1"]
    assert "peer 2 and later ones" in caplog.text


@pytest.mark.parametrize("content", [b"", b"x" * 64])
def test_server_keeps_no_segment_that_it_cannot_use(content: bytes) -> None:
    server = WeightServer("owner")
    with closing(SharedSegment.create("weights", max(1, len(content)))) as segment:
        segment.write(content, 0)
        source = server.source([segment.address], "127.0.0.1")
        ((token, key),) = source.credentials
        stream = connect_stream("127.0.0.1", StreamOffer(source.port, token, key), 1 << 20)
        assert stream is not None
        with closing(stream):
            stream.send(b"{}", 60.0)
            answer = json.loads(bytes(stream.receive(60.0) or b""))
        server.close()  # waits for its threads
        links = [os.readlink(f"/proc/self/fd/{each}") for each in descriptors()]
        assert "the segment has" in answer["problem"]
        assert links.count(f"/memfd:{segment.name} (deleted)") == 1


def descriptors() -> list[str]:
    """Return the open files of this process, without the one that lists them."""
    return [each for each in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{each}")]


def test_weights_of_other_files_or_settings_are_not_copied(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with weights_owner(config) as owner:
        other = replace(config, model=replace(config.model, dtype="bfloat16"))
        assert load_from(owner, other) != owner.digest
        assert "the segment has weights with another settings" in caplog.text
    with weights_owner(config) as owner:
        os.utime(Path(config.model.path) / "model.safetensors", (1, 1))
        assert load_from(owner, config) == owner.digest
        assert "the segment has weights with another files" in caplog.text


def test_copy_with_other_bytes_is_not_used(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with weights_owner(config) as owner:
        fill = weight_peers._fill

        def fill_and_change(segment: SharedSegment, *arguments: Any) -> None:
            fill(segment, *arguments)
            segment.write(b"\x55" * 64, segment.num_bytes // 4)

        monkeypatch.setattr(weight_peers, "_fill", fill_and_change)
        assert load_from(owner, config) == owner.digest
    assert "of the copy differs from what was written" in caplog.text


def test_source_without_the_right_token_gives_nothing(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with weights_owner(config) as owner:
        ((token, key),) = owner.source.credentials
        for wrong in ((bytes(16), key), (token, bytes(32))):
            caplog.clear()
            stranger = replace(owner, source=replace(owner.source, credentials=(wrong,)))
            assert load_from(stranger, config) == owner.digest
            assert "the weights of the owner are not copied" in caplog.text


def test_host_with_several_memory_nodes_copies_the_mapped_weights(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_weights, "_num_memory_nodes", lambda: 2)
    with (
        closing(load_runner(config)) as first,
        closing(load_runner(config, [WeightSource("first", first.weight_segments)])) as second,
    ):
        assert second.weight_segments[0].name != first.weight_segments[0].name
        assert digest_of(logits_of(second)) == digest_of(logits_of(first))


def test_source_of_a_rank_without_segments_has_no_port() -> None:
    server = WeightServer("nobody")
    assert server.source([], "127.0.0.1") == WeightSource("nobody", ())
    server.close()


def test_time_of_the_files_is_that_of_a_share(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.safetensors").write_bytes(bytes(1 << 20))
    assert seconds_to_read(tmp_path, 1) > 0.0
    assert seconds_to_read(tmp_path / "none", 1) == 0.0
