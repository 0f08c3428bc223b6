"""The splits that `quire fit --nodes` shows, and the table of docs/over_nodes.md that is made of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from state_kinds import STATE_KINDS

from benchmarks.splits import GPUS_OF_A_NODE, MODELS, PAGE, SEQ_LEN, WORKLOAD, lines_of
from quire.cluster.cli.fit import fit
from quire.cluster.cli.splits import Nodes, Split, best_split, find_splits
from quire.cluster.config.capacity import Workload
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import gpu_bytes
from quire.cluster.config.model_source import describe_files
from quire.cluster.simulation.step_time import find_device
from quire.proto.errors import ConfigError
from quire.worker import make_meta_model, measure_weights

KIMI = MODELS["Kimi K2, fp8"]


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("kimi")
    (folder / "config.json").write_text(json.dumps(KIMI))
    return str(folder)


def splits_of(folder: str) -> list[Split]:
    model = describe_files(EngineOptions(folder))
    weights = measure_weights(model, make_meta_model(model), 2)
    workload = Workload(**WORKLOAD, dtype_bytes=2, kv_bytes=2)
    nodes = Nodes(3, GPUS_OF_A_NODE)
    return find_splits(model, weights, nodes, find_device("h200"), gpu_bytes("h200"), workload, SEQ_LEN)


@pytest.fixture(scope="module")
def splits(kimi: str) -> list[Split]:
    return splits_of(kimi)


def test_stages_fill_nodes(splits: list[Split]) -> None:
    sizes = {(split.pipeline, split.tensor) for split in splits}
    assert {(1, 8), (2, 8), (3, 8), (1, 16)} <= sizes
    assert (2, 4) not in sizes  # a node has room for both stages as one group
    assert all(pipeline * tensor <= 24 for pipeline, tensor in sizes)
    assert {split.tensor for split in splits if split.spans_nodes} == {16}


def test_groups_stay_within_a_node_if_that_fits(splits: list[Split]) -> None:
    """Two stages and one group of sixteen have as many GPUs; sums over a network take longer."""
    best = best_split([split for split in splits if split.attention_groups == 1])
    assert best is not None
    assert (best.pipeline, best.tensor) == (2, 8)
    wide = next(split for split in splits if split.tensor == 16 and not split.whole_experts)
    assert wide.fits
    assert wide.step_s > best.step_s


def test_tokens_that_travel_take_the_place_of_sums_and_of_latents(splits: list[Split]) -> None:
    """Each GPU, or each node, has the latents of its own sequences; sums stay within a node."""
    of_sixteen = {
        split.attention_groups: split for split in splits if split.tensor == 16 and split.whole_experts
    }
    assert of_sixteen.keys() == {1, 2, 16}
    assert [of_sixteen[groups].spans_nodes for groups in (1, 2, 16)] == [True, False, False]
    tokens = [of_sixteen[groups].capacity.num_kv_tokens for groups in (1, 2, 16)]
    assert 1.8 * tokens[0] < tokens[1] < 2 * tokens[0]
    assert 12 * tokens[0] < tokens[2] < 16 * tokens[0]
    assert best_split(splits) == of_sixteen[16]


def test_sequences_are_not_divided_where_serving_refuses_it(make_model: Callable[..., Path]) -> None:
    splits = splits_of(str(make_model("glm5_next_text", **STATE_KINDS["glm5_next_text"])))
    assert splits
    assert {split.attention_groups for split in splits} == {1}


def test_stages_divide_weights_and_latents(splits: list[Split]) -> None:
    by_size = {(split.pipeline, split.tensor): split.capacity for split in splits if not split.whole_experts}
    one, two = by_size[1, 8], by_size[2, 8]
    assert two.weight_bytes == pytest.approx(one.weight_bytes / 2, rel=0.06)
    assert two.kv_token_bytes == pytest.approx(one.kv_token_bytes / 2, rel=0.06)


def test_command_names_the_options_of_the_best_split(
    kimi: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    fit(kimi, gpu="h200", nodes=2)
    shown = capsys.readouterr().out
    assert "16 over nodes" in shown
    flags = "--tensor-parallel-size 16 --enable-expert-parallel --all2all-backend all_to_all --enable-dp-attention"
    assert f"The fewest GPUs: {flags}" in " ".join(shown.split())
    with pytest.raises(ConfigError, match="does not fit on 1 x 8 x h200; add nodes"):
        fit(kimi, gpu="h200", nodes=1)


def test_page_has_the_lines_of_the_command() -> None:
    assert lines_of("Kimi K2, fp8", "h200")
    assert all(line in PAGE.read_text() for line in lines_of("Kimi K2, fp8", "h200"))
