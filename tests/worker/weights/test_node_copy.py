"""Copies of weights that pass from node to node, in processes that stand for nodes, and every way to the source."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from copy_node import Copied, CopyNode, Node, copy_node
from weights_owner import digest_of, load_runner, logits_of

from quire.proto.config import EngineConfig
from quire.worker.weights import node_cache
from quire.worker.weights.node_cache import CHECKSUMS, FOLDER_VARIABLE
from quire.worker.weights.weight_source import NO_PEERS, NodePeers, WeightSource

PIECE_BYTES = 1 << 14
# A node reads at most so many pieces by itself besides its part, by which it knows the rate of the source.
NUM_TRIALS = 1


@pytest.fixture
def source(make_model: Callable[..., Path]) -> Path:
    return make_model("llama")


def pieces_of(source: Path) -> list[tuple[str, int]]:
    files = [*source.glob("*.safetensors"), *source.glob("*.safetensors.index.json")]
    return sorted((file.name, at) for file in files for at in range(0, file.stat().st_size, PIECE_BYTES))


@contextmanager
def start_nodes(
    tmp_path: Path, source: Path, count: int, **settings: Mapping[str, Any]
) -> Iterator[list[CopyNode]]:
    """Start processes; the settings are by the name of a node: a, b, ..."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                copy_node(Node(name, tmp_path / name, source, count, PIECE_BYTES, **settings.get(name, {})))
            )
            for name in "abcd"[:count]
        ]


def fellows(nodes: list[CopyNode], own: int) -> NodePeers:
    return NodePeers(tuple(each.sources[own] for each in nodes), own)


def later(nodes: list[CopyNode], own: int) -> NodePeers:
    """Return the peers of a node that began after those before it."""
    return NodePeers(earlier=tuple(each.sources[own] for each in reversed(nodes[:own])))


def copy_all(nodes: list[CopyNode], peers: Callable[[list[CopyNode], int], NodePeers]) -> list[Copied]:
    for number, node in enumerate(nodes):
        node.begin(peers(nodes, number))
    return [node.result() for node in nodes]


def check_copies(copies: list[Copied], source: Path) -> None:
    """Check that each copy has the bytes of the source."""
    for copy in copies:
        assert copy.folder != source
        assert (copy.folder / CHECKSUMS).is_file()
        for name in {name for name, _ in pieces_of(source)}:
            assert (copy.folder / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("count", [2, 4])
def test_nodes_of_a_replica_read_each_piece_of_the_source_once_in_total(
    source: Path, tmp_path: Path, count: int
) -> None:
    with start_nodes(tmp_path, source, count) as nodes:
        copies = copy_all(nodes, fellows)
    check_copies(copies, source)
    assert sorted(piece for copy in copies for piece in copy.pieces) == pieces_of(source)
    for copy in copies:
        assert len(copy.pieces) >= len(pieces_of(source)) // (2 * count), "each node reads its part"


def test_replicas_that_start_together_read_the_source_once(source: Path, tmp_path: Path) -> None:
    with start_nodes(tmp_path, source, 4, a={"piece_s": 0.02}) as nodes:
        copies = copy_all(nodes, later)
    check_copies(copies, source)
    assert sorted(copies[0].pieces) == pieces_of(source)
    assert [len(copy.pieces) for copy in copies[1:]] == [NUM_TRIALS] * 3


def test_later_replica_of_two_nodes_reads_the_copy_of_an_earlier_one(source: Path, tmp_path: Path) -> None:
    with start_nodes(tmp_path, source, 3) as nodes:
        nodes[0].begin(NO_PEERS)
        nodes[0].result()
        pair = nodes[1:]
        for own, node in enumerate(pair):
            node.begin(
                NodePeers(tuple(each.sources[own] for each in pair), own, (nodes[0].sources[own + 1],))
            )
        copies = [node.result() for node in pair]
    check_copies(copies, source)
    assert [len(copy.pieces) for copy in copies] == [NUM_TRIALS] * 2


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_node_that_ends_or_stops_in_the_middle_means_reading_the_source(
    source: Path,
    tmp_path: Path,
    kind: signal.Signals,
    engine_config: Callable[..., EngineConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    total = len(pieces_of(source))
    silence_s = 60.0 if kind is signal.SIGKILL else 5.0
    settings: dict[str, dict[str, Any]] = {"a": {"stops_at": total // 4}, "b": {"silence_s": silence_s}}
    with start_nodes(tmp_path, source, 2, **settings) as nodes:
        for number, node in enumerate(nodes):
            node.begin(fellows(nodes, number))
        nodes[1].wait_for(total // 2 + 1)  # more than its own part
        nodes[0].process.send_signal(kind)
        copy = nodes[1].result()
    check_copies([copy], source)
    assert "the copy of a is read no further" in copy.log
    if kind is signal.SIGSTOP:
        assert "a has not sent what was asked for in 5.0 s" in copy.log
    assert total - total // 4 <= len(copy.pieces) < total
    # The tokens are those of the source.
    config = engine_config(source)
    with closing(load_runner(config)) as runner:
        expected = digest_of(logits_of(runner))
    monkeypatch.setattr(node_cache, "_device_of", lambda path: 1 if path == tmp_path / "b" else 2)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "b"))
    with closing(load_runner(config)) as runner:
        assert digest_of(logits_of(runner)) == expected


def test_piece_with_other_bytes_is_read_from_the_source(source: Path, tmp_path: Path) -> None:
    with start_nodes(tmp_path, source, 2, a={"wrong_piece": len(pieces_of(source)) // 2 - 1}) as nodes:
        copies = copy_all(nodes, later)
    check_copies(copies, source)
    assert "of a is not what was read from the source" in copies[1].log
    assert 0 < len(copies[1].pieces) < len(pieces_of(source))


def test_peer_that_sends_no_more_is_given_up_and_named(source: Path, tmp_path: Path) -> None:
    with start_nodes(tmp_path, source, 2, a={"max_pieces": 3}, b={"silence_s": 1.0}) as nodes:
        copies = copy_all(nodes, later)
    check_copies(copies, source)
    assert "TimeoutError: a has not sent what was asked for in 1.0 s" in copies[1].log


def test_peer_whose_copy_does_not_go_on_is_given_up_and_named(source: Path, tmp_path: Path) -> None:
    with start_nodes(tmp_path, source, 2, b={"piece_timeout_s": 1.5}) as nodes:
        nodes[1].begin(later(nodes, 1))  # and a never begins
        copy = nodes[1].result()
    check_copies([copy], source)
    assert "TimeoutError: a has not had piece 0 in 1.5 s" in copy.log


def test_next_earlier_replica_is_asked_after_one_that_ended(source: Path, tmp_path: Path) -> None:
    with start_nodes(tmp_path, source, 3) as nodes:
        for number in (0, 1):
            nodes[number].begin(later(nodes, number))
            nodes[number].result()
        nodes[1].kill()
        nodes[2].begin(later(nodes, 2))
        copy = nodes[2].result()
    check_copies([copy], source)
    assert "the copy of b is read no further" in copy.log
    assert len(copy.pieces) == NUM_TRIALS


def test_node_without_this_copy_says_so_at_once(source: Path, tmp_path: Path) -> None:
    with start_nodes(tmp_path, source, 2) as nodes:
        nodes[0].begin(NO_PEERS)
        copied = nodes[0].result()
        for file in source.glob("*.safetensors"):
            file.touch()  # other files, as after an update
        nodes[1].begin(later(nodes, 1))
        copy = nodes[1].result()
    assert copied.folder.name != copy.folder.name
    check_copies([copy], source)
    assert "the copy of a is read no further: ValueError: its node has no copy" in copy.log


def test_stranger_without_the_right_token_gets_no_piece(source: Path, tmp_path: Path) -> None:
    with start_nodes(tmp_path, source, 3) as nodes:
        nodes[0].begin(NO_PEERS)
        nodes[0].result()
        for own in (1, 2):
            of_reader = nodes[0].sources[own]
            token, key = of_reader.credentials[0]
            wrong = (bytes(16), key) if own == 1 else (token, bytes(32))
            nodes[own].begin(NodePeers(earlier=(replace(of_reader, credentials=(wrong,)),)))
            copy = nodes[own].result()
            assert "the copy of a is read no further" in copy.log
            assert sorted(copy.pieces) == pieces_of(source)


def test_peer_that_is_much_slower_than_the_source_is_given_up(source: Path, tmp_path: Path) -> None:
    with start_nodes(tmp_path, source, 2, a={"send_s": 2.0}, b={"trial_s": 0.2}) as nodes:
        nodes[0].begin(NO_PEERS)
        nodes[0].result()
        nodes[1].begin(later(nodes, 1))
        copy = nodes[1].result()
    check_copies([copy], source)
    assert "TimeoutError: a would take" in copy.log


def test_files_that_change_meanwhile_are_not_mixed(source: Path, tmp_path: Path) -> None:
    with start_nodes(tmp_path, source, 1, a={"stops_at": 2}) as nodes:
        nodes[0].begin(NO_PEERS)
        nodes[0].wait_for(2)
        (source / "model.safetensors").touch()
        nodes[0].node.go.touch()
        copy = nodes[0].result()
    assert copy.folder == source
    assert "changed meanwhile" in copy.log


def test_model_after_the_last_credential_has_no_peers() -> None:
    one = WeightSource("a", (), "host", 1, ((b"t", b"k"), (b"u", b"l")))
    peers = NodePeers((one, one), 0, (one,))
    assert peers.after_a_use().earlier[0].credentials == ((b"u", b"l"),)
    assert peers.after_a_use().after_a_use() == NO_PEERS
