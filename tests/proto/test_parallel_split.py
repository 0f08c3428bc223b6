"""ParallelSplit and the division of layers: coordinates of ranks, balanced stages, and what cannot be divided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from quire.cluster.config.model_config import describe_model
from quire.proto.errors import ConfigError
from quire.proto.model.divide_layers import divide_layers, head_cost, layer_costs
from quire.proto.model.parallel_split import WHOLE_MODEL, Coordinate, ParallelSplit
from quire.proto.model.registry import check_supported
from quire.proto.model.spec import DecoderSpec
from quire.proto.vision import VisionSpec


def test_rank_is_a_coordinate() -> None:
    split = ParallelSplit(2, 4, 4, 2, (5, 3))
    assert split.num_ranks == 8
    assert split.place_of(6) == Coordinate(stage=1, tensor=2, attention=2, expert=0)
    assert list(split.ranks_of(1)) == [4, 5, 6, 7]
    assert list(split.sharers_of(6)) == [6]
    assert list(ParallelSplit(2, 4).sharers_of(6)) == [4, 5, 6, 7]
    pairs = ParallelSplit(2, 4, 2)
    assert [pairs.place_of(rank).attention for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert list(pairs.sharers_of(7)) == [6, 7]
    assert split.result_rank == 4
    assert (split.stage_of(3).first, split.stage_of(3).end) == (0, 5)
    assert (split.stage_of(4).first, split.stage_of(4).end) == (5, 8)
    assert split.describe(5) == "stage 1 of 2, layers 5 to 7"
    assert ParallelSplit(1, 4).stage_of(3) == WHOLE_MODEL
    assert ParallelSplit(1, 4).describe(3) == ""


def spec_of(folder: Path) -> DecoderSpec:
    spec = check_supported(describe_model(folder, "tiny"), 1)
    assert isinstance(spec, DecoderSpec)
    return spec


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "qwen3_next"])
def test_slowest_stage_is_as_fast_as_possible(
    make_model: Callable[..., Path], kind: str, num_stages: int
) -> None:
    """Compared with all divisions."""
    spec = spec_of(make_model(kind, seed=7))
    layers = (spec.layers * 4)[:9]
    spec = replace(spec, layers=layers)
    costs = [*layer_costs(spec)[:-1], layer_costs(spec)[-1] + head_cost(spec)]

    def slowest(bounds: tuple[int, ...]) -> float:
        return max(sum(costs[start:end]) for start, end in pairwise((0, *bounds, len(costs))))

    best = min(slowest(bounds) for bounds in combinations(range(1, len(costs)), num_stages - 1))
    sizes = divide_layers("tiny", spec, num_stages)
    assert sum(sizes) == len(layers)
    bounds = tuple(sum(sizes[: index + 1]) for index in range(num_stages - 1))
    assert slowest(bounds) == pytest.approx(best)


def test_more_stages_than_layers_are_refused(make_model: Callable[..., Path]) -> None:
    spec = spec_of(make_model("llama"))
    with pytest.raises(
        ConfigError, match="its 3 layers make at most 3 stages; use pipeline_parallel_size 3 or less"
    ):
        divide_layers("tiny", spec, 4)


def test_stage_does_not_begin_with_a_layer_that_follows_an_indexer(make_model: Callable[..., Path]) -> None:
    spec = spec_of(make_model("glm_moe_dsa", seed=7))
    follows = [
        index for index, layer in enumerate(spec.layers) if not getattr(layer.mixer, "has_indexer", True)
    ]
    most = len(spec.layers) - len([index for index in follows if index])
    for num_stages in range(2, most + 1):
        sizes = divide_layers("tiny", spec, num_stages)
        assert not {sum(sizes[:index]) for index in range(1, num_stages)} & set(follows)
    with pytest.raises(ConfigError, match=f"make at most {most} stages"):
        divide_layers("tiny", spec, most + 1)


def test_first_stage_has_the_layers_that_read_images(make_model: Callable[..., Path]) -> None:
    spec = spec_of(make_model("llama"))
    spec = replace(spec, layers=(spec.layers * 4)[:9])
    vision = VisionSpec("qwen3_vl", 0, embedding_size=8, num_deep_features=7)
    assert divide_layers("tiny", spec, 3, vision) == (7, 1, 1)
    with pytest.raises(ConfigError, match="make at most 3 stages"):
        divide_layers("tiny", spec, 4, vision)


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text"])
def test_layers_that_read_others_are_refused(make_model: Callable[..., Path], kind: str) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size does not support this architecture"):
        divide_layers("tiny", spec_of(make_model(kind, seed=7)), 2)
