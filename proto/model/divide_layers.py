"""Division of a model's layers into pipeline stages that take equally long, by the weights that a token passes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from ..errors import ConfigError
from ..vision import VisionSpec
from .attention import AttentionSpec
from .experts import Experts
from .families.muse_spark import MuseSpark
from .mla import MlaSpec
from .spec import DecoderSpec, LayerSpec

# Weights of a mixer that keeps a state, in units of hidden size squared: projections of the input, the gate, and the
# output. Only the proportion to the other layers matters.
_STATE_MIXER_SQUARES = 4


def divide_layers(
    name: str, spec: DecoderSpec, num_stages: int, vision: VisionSpec | None = None
) -> tuple[int, ...]:
    """Return the number of layers of each stage, so that the slowest stage computes a token as fast as possible.

    Args:
        name: of the model.
        vision: of a model that reads images, which the first stage encodes for the first layers.

    Raises:
        ConfigError: the model cannot be divided into so many stages; names the most that work.
    """
    _check_divisible(name, spec)
    costs = layer_costs(spec)
    fewest = 1 if vision is None else max(1, vision.num_deep_features)
    starts = [index for index, layer in enumerate(spec.layers) if index >= fewest and _may_begin(layer)]
    if num_stages > 1 + len(starts):
        raise ConfigError(
            f"{name}: pipeline_parallel_size is {num_stages}, but its {len(costs)} layers make at most "
            f"{1 + len(starts)} stages; use pipeline_parallel_size {1 + len(starts)} or less"
        )
    bounds = _best_bounds([*costs[:-1], costs[-1] + head_cost(spec)], starts, num_stages)
    return tuple(end - start for start, end in pairwise(bounds))


def layer_costs(spec: DecoderSpec) -> list[float]:
    """Return the weights of each layer that a token is multiplied with: its time of compute, up to a factor."""
    return [_mixer_cost(layer.mixer, spec) + _mlp_cost(layer, spec) for layer in spec.layers]


def head_cost(spec: DecoderSpec) -> float:
    """Return the same for the head. The embedding of the first stage is looked up, which costs next to nothing."""
    return float(spec.vocab_size * spec.hidden_size)


def _check_divisible(name: str, spec: DecoderSpec) -> None:
    kinds = {
        "parts of its layers read what other layers compute": not isinstance(spec.variant, MuseSpark | None),
        "layers share the keys and values of others": any(own.kv_source is not None for own in spec.layers),
    }
    for reason, is_so in kinds.items():
        if is_so:
            raise ConfigError(
                f"{name}: pipeline_parallel_size does not support this architecture: {reason}; leave it out, or use "
                "tensor_parallel_size"
            )


def _may_begin(layer: LayerSpec) -> bool:
    """Return whether a stage may begin with a layer: not if an indexer before it selects its tokens."""
    mixer = layer.mixer
    return not isinstance(mixer, MlaSpec) or mixer.indexer is None or mixer.has_indexer


def _best_bounds(costs: Sequence[float], starts: Sequence[int], num_stages: int) -> list[int]:
    """Return the first layer of each stage, and the number of layers, with the least cost of the costliest stage.

    Args:
        starts: layers that a stage after the first may begin with, ascending.
    """
    # best[end] = (cost of the costliest stage, sum of squares, bounds) of the layers before `end`. The squares choose
    # the most even of the divisions that are as good.
    sums = [0.0, *accumulate(costs)]
    ends = [*starts, len(costs)]
    best: dict[int, tuple[float, float, list[int]]] = {
        end: (sums[end], sums[end] ** 2, [0, end]) for end in ends
    }
    for _ in range(num_stages - 1):
        found: dict[int, tuple[float, float, list[int]]] = {}
        for end in ends:
            choices = [
                (
                    max(most, sums[end] - sums[start]),
                    squares + (sums[end] - sums[start]) ** 2,
                    [*bounds, end],
                )
                for start, (most, squares, bounds) in best.items()
                if start < end
            ]
            if choices:
                found[end] = min(choices)
        best = found
    return best[len(costs)][2]


def _mixer_cost(mixer: object, spec: DecoderSpec) -> float:
    hidden = spec.hidden_size
    if isinstance(mixer, AttentionSpec):
        return float(hidden * mixer.head_dim * 2 * (mixer.num_heads + mixer.num_kv_heads))
    if isinstance(mixer, MlaSpec):
        query_dim = mixer.num_heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim)
        rank = mixer.query_rank
        queries = hidden * query_dim if rank is None else rank * (hidden + query_dim)
        latent = hidden * (mixer.rank + mixer.qk_rope_head_dim)
        expansion = mixer.rank * mixer.num_heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)
        return float(queries + latent + expansion + mixer.num_heads * mixer.v_head_dim * hidden)
    return 0.0 if mixer is None else float(_STATE_MIXER_SQUARES * hidden * hidden)


def _mlp_cost(layer: LayerSpec, spec: DecoderSpec) -> float:
    hidden = spec.hidden_size
    if layer.has_experts and spec.experts is not None:
        return _experts_cost(spec.experts, hidden)
    if layer.mlp is None:
        return 0.0
    return float(hidden * layer.mlp.intermediate_size * (3 if layer.mlp.names is None else 2))


def _experts_cost(experts: Experts, hidden: int) -> float:
    width = experts.latent_size or hidden
    num_matrices = 3 if experts.gated else 2
    routed = experts.top_k * experts.intermediate_size * width * num_matrices
    return float(routed + 3 * experts.shared_intermediate_size * hidden + experts.count * hidden)
