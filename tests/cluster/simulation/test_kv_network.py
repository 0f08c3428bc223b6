"""KvPeer: what a simulated rank reads takes the time of its bytes."""

from __future__ import annotations

import numpy as np
import pytest
from state_kinds import STATE_KINDS

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.model_source import describe_files
from quire.cluster.config.resolve import engine_config
from quire.cluster.simulation.kv_network import KvNetwork, KvPeer
from quire.proto.config import EngineConfig
from quire.proto.kv_layout import layout_of
from quire.proto.kv_transfer import KvOrders, KvPull, KvReport, KvReportKind
from quire.proto.model.registry import state_layers
from quire.proto.model.state import state_bytes

RATE = 1e6


def pulled(config: EngineConfig, num_blocks: int, num_states: int) -> tuple[KvReport, KvReport]:
    """Return the reports that a rank serves, and that it has pulled blocks of the first group and states."""
    network = KvNetwork(RATE)
    lender, reader = KvPeer(network, "lender", config), KvPeer(network, "reader", config)
    (serves,) = lender.take_reports(0.0)
    group_lens = [num_blocks, *[0] * (len(config.cache_layout.groups) - 1), *[1] * num_states]
    blocks = np.arange(1, 1 + sum(group_lens), dtype=np.int32)
    reader.take_reports(0.0)
    reader.apply(KvOrders(pulls=(KvPull(1, 1, ("lender",), np.array(group_lens), blocks, blocks, 9.0),)), 0.0)
    (report,) = reader.take_reports(100.0)
    return serves, report


@pytest.mark.parametrize("num_states", [0, 1])
def test_a_pull_takes_the_time_of_its_blocks_and_state(make_model: object, num_states: int) -> None:
    folder = make_model("qwen3_next", seed=7, **STATE_KINDS["qwen3_next"])  # type: ignore[operator]
    options = EngineOptions(str(folder), dtype="float32")
    config = engine_config(options, describe_files(options))
    serves, report = pulled(config, 3, num_states)
    num_state_bytes = state_bytes(state_layers(config.model, 1), 4)
    assert report.kind is KvReportKind.PULLED
    assert serves.num_bytes == num_state_bytes > 0
    assert report.num_bytes == 3 * layout_of(config, 0, "").block_bytes[0] + num_states * num_state_bytes
    assert report.seconds == pytest.approx(report.num_bytes / RATE)
