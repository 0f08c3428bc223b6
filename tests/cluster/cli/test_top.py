"""`quire top`: its screen, and what it shows of servers that answer, hang and are gone."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from deadlines import CALL_TIMEOUT_S
from local_server import ThreadedServer, threaded_server
from rich.console import Console

from quire import Client, FleetInfo, KvCacheInfo, LatencyInfo, QueueInfo, RankStatus, ReplicaInfo, TrafficInfo
from quire.cluster.cli.status import _figures
from quire.cluster.cli.top import look_at
from quire.cluster.cli.top_view import GLYPHS, MAP_LINES, Look, block_map_text, render
from quire.cluster.client.wire.status import BlockMapInfo, DeploymentInfo, NodeInfo
from quire.proto.block_map import BlockState

TRAFFIC = TrafficInfo(
    "tiny",
    60.0,
    3,
    1,
    100.0,
    1234.0,
    2.5,
    0.0,
    LatencyInfo(0.05, 2.0),
    LatencyInfo(),
    (0.0, 0.0, 400.0, 800.0),
)
REPLICA = ReplicaInfo(
    "replica-1", "tiny", ready=True, ranks=(RankStatus(0, 7, "node", "cuda:0", "step"),),
    kv=KvCacheInfo(16, 100, 30, 20, num_fenced_blocks=5), queue=QueueInfo(2, 3), num_steps=9, oldest_wait_s=4.0,
)  # fmt: skip


def shown(look: Look, now: float = 100.0, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(look, "host:1", now, width))
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_screen_shows_traffic_replica_blocks_and_nodes() -> None:
    deployment, node = DeploymentInfo("tiny", "v1", 1, 4, 2), NodeInfo("node-1", "10.0.0.1", True)
    blocks = BlockMapInfo(5, 1, bytes(BlockState), (-1,) * 5)
    fleet = FleetInfo((REPLICA,), (deployment,), (node,), "stale", (TRAFFIC,))
    text = shown(Look(99.0, fleet, {"replica-1": blocks}))
    for expected in (
        "quire top  host:1",
        "out of date: stale",
        "1/2",
        "1,234",
        "50 ms / 2.0 s",
        "▁█",
        "replica-1  tiny   ready",
        "3 running, 2 waiting (oldest 4 s)",
        "30 of 100 blocks active, 5 fenced, 20 cached, 45 empty",
        "·░x█▓",
        "· empty",
        "rank 0 cuda:0 node step",
        "draining",
    ):
        assert expected in text, expected


def test_fullest_partition_is_shown_where_it_is_fuller_than_the_others() -> None:
    """With data-parallel attention requests wait for one rank's blocks, while those of the others are free."""
    for fullest, is_shown in ((0.0, False), (0.3, False), (0.6, True)):
        kv = KvCacheInfo(16, 100, 30, 20, fullest_kv_use=fullest)
        replica = replace(REPLICA, kv=kv)
        figures = dict(_figures(replica))
        assert (
            "blocks active (60% of the fullest rank's)" in shown(Look(99.0, FleetInfo((replica,))))
        ) == is_shown
        assert ("30 of 100 used, 60% of the fullest rank's" in figures["KV blocks"]) == is_shown


def test_screen_names_the_time_since_which_there_is_no_answer() -> None:
    text = shown(Look(90.0, FleetInfo((REPLICA,)), problem="ReplicaUnavailable: it is gone"))
    since = time.strftime("%H:%M:%S", time.localtime(90.0))
    assert f"no answer since {since}, 10 s: ReplicaUnavailable: it is gone" in text
    assert "replica-1" in text
    assert "no answer: gone" in shown(Look(problem="gone"))


def test_replica_that_hangs_is_silent_although_it_was_ready() -> None:
    silent = ReplicaInfo("replica-1", "tiny", ready=True, silence_s=12.0)
    assert "silent for 12 s" in shown(Look(99.0, FleetInfo((silent,))))
    starting = ReplicaInfo("replica-1", "tiny", state="starting", problem="loads weights")
    assert "starting: loads weights" in shown(Look(99.0, FleetInfo((starting,))))


def test_block_map_fits_and_shows_the_most_frequent_state() -> None:
    states = bytes([BlockState.HELD] * 3000 + [BlockState.CACHED] * 5000)
    lines = block_map_text(BlockMapInfo(8000, 1, states, (-1,) * 8000), 40).plain.splitlines()
    assert len(lines) == MAP_LINES + 1
    assert {len(line) for line in lines[:MAP_LINES]} == {40}
    drawn = "".join(lines[:MAP_LINES])
    held, cached = (drawn.count(GLYPHS[state][0]) for state in (BlockState.HELD, BlockState.CACHED))
    assert (held, cached) == (60, 100)
    assert "(50 blocks per character)" in lines[-1]


def test_block_map_shows_state_slots_below_the_blocks() -> None:
    slots = bytes([BlockState.HELD, BlockState.CACHED, BlockState.EMPTY])
    states = bytes([BlockState.HELD] * 5)
    lines = block_map_text(
        BlockMapInfo(5, 1, states, (-1,) * 5, (), slots, (2, -1, -1)), 40
    ).plain.splitlines()
    glyphs = "".join(GLYPHS[BlockState(state)][0] for state in slots)
    assert lines[1:3] == ["state slots", glyphs]


@pytest.fixture(scope="module")
def server(make_model: Callable[..., Path]) -> Iterator[ThreadedServer]:
    with threaded_server(make_model("llama")) as server:
        yield server


def test_look_at_a_server_that_answers_and_one_that_is_gone(
    server: ThreadedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(server.server.target) as client, monkeypatch.context() as patch:
        patch.setattr(sys.modules[look_at.__module__], "ANSWER_TIMEOUT_S", CALL_TIMEOUT_S)
        look = look_at(client, Look())
        assert look.problem == ""
        assert look.maps["replica-0"].num_blocks == 63
    assert "replica-0  tiny   ready" in shown(look)
    with Client("127.0.0.1:1") as nobody:
        later = look_at(nobody, look)
    assert (later.seen_at, later.fleet) == (look.seen_at, look.fleet)
    assert "127.0.0.1:1" in later.problem


def test_screen_of_80_columns_has_whole_lines_of_traffic() -> None:
    deployment = DeploymentInfo("tiny", "v1", 1, 4, 2)
    busy = replace(
        TRAFFIC, generated_tokens_per_s=123_456.0, prompt_tokens_per_s=1_234_567.0, errors_per_s=1.5
    )
    lines = shown(Look(99.0, FleetInfo((REPLICA,), (deployment,), (), "", (busy,))), width=80).splitlines()
    assert "tiny  1/2 replicas, 3 open, 1 unplaced" in lines
    assert "  123,456 generated and 1,234,567 prompt tok/s, 2.5 done/s, 1.5 errors/s" in lines
    assert "  p50/p99: first token 50 ms / 2.0 s, next -" in lines
    assert max(map(len, lines)) <= 80
