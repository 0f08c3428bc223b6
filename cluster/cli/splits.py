"""Candidate splits of a model over GPUs and nodes: their memory and the time of a step, from a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...proto.config import ModelConfig
from ...proto.errors import ConfigError
from ...proto.model.divide_layers import divide_layers, head_cost, layer_costs
from ...proto.model.registry import check_supported
from ...proto.model.spec import DecoderSpec
from ...worker import WeightSize
from ..config.capacity import Capacity, Workload, capacity
from ..simulation.engine import model_cost
from ..simulation.step_time import ASSUMED, Device, StepTime, StepWork

# Of one GPU's port of 400 Gb/s; and an all-reduce of few bytes, or a transfer, over it.
NETWORK_BYTES_PER_S = 50e9
NETWORK_LATENCY_S = 20e-6


@dataclass(frozen=True, slots=True)
class Nodes:
    """GPUs at hand.

    Attributes:
        gpus: of each node.
    """

    count: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Split:
    """A way to divide a model, and what it takes.

    Attributes:
        whole_experts: ranks of a stage hold experts whole.
        spans_nodes: a tensor-parallel group has GPUs of several nodes.
        capacity: of the stage with the most weights; the tokens that fit are those of all stages.
        step_s: for one token of each of `num_sequences`; of what fits.
    """

    pipeline: int
    tensor: int
    whole_experts: bool
    spans_nodes: bool
    capacity: Capacity
    step_s: float
    num_sequences: int

    @property
    def fits(self) -> bool:
        return self.capacity.num_kv_tokens > 0


def find_splits(
    model: ModelConfig,
    weights: WeightSize,
    nodes: Nodes,
    device: Device,
    gpu_bytes: int,
    workload: Workload,
    seq_len: int,
) -> list[Split]:
    """Return the splits of a model that use whole nodes or a part of one, in the order of their GPUs.

    Args:
        seq_len: tokens of the sequences in the estimated step.
    """
    found = []
    for tensor in range(1, nodes.count * nodes.gpus + 1):
        if tensor > nodes.gpus and tensor % nodes.gpus:
            continue
        for pipeline in range(1, nodes.count * nodes.gpus // tensor + 1):
            if not _fills_nodes(pipeline, tensor, nodes):
                continue
            for whole_experts in (False, True):
                sizes = pipeline, tensor, whole_experts
                split = _try_split(model, weights, nodes, device, gpu_bytes, workload, seq_len, sizes)
                if split is not None:
                    found.append(split)
    return sorted(
        found, key=lambda split: (split.pipeline * split.tensor, split.pipeline, split.whole_experts)
    )


def best_split(splits: Sequence[Split]) -> Split | None:
    """Return the split with the fewest GPUs that fits, then the fastest: a group within a node if there is one."""
    fitting = [split for split in splits if split.fits]
    return min(
        fitting,
        key=lambda split: (split.pipeline * split.tensor, split.spans_nodes, split.step_s),
        default=None,
    )


def _fills_nodes(pipeline: int, tensor: int, nodes: Nodes) -> bool:
    """Return whether stages fill nodes: several stages have a node each, or a group has several nodes."""
    if pipeline == 1:
        return True
    return tensor % nodes.gpus == 0 and pipeline * tensor <= nodes.count * nodes.gpus


def _try_split(
    model: ModelConfig,
    weights: WeightSize,
    nodes: Nodes,
    device: Device,
    gpu_bytes: int,
    workload: Workload,
    seq_len: int,
    sizes: tuple[int, int, bool],
) -> Split | None:
    """Return a split. Returns None if the model cannot be divided so."""
    pipeline, tensor, whole_experts = sizes
    try:
        spec = check_supported(model, tensor, expert_parallel=whole_experts)
        has_experts = isinstance(spec, DecoderSpec) and spec.experts is not None
        if whole_experts and (not has_experts or tensor == 1):
            return None
        share = _largest_share(model, spec, pipeline)
    except ConfigError:
        return None
    num_experts = (
        spec.experts.count if whole_experts and isinstance(spec, DecoderSpec) and spec.experts else 0
    )
    # The costliest stage has the most weights; KV is divided as layers are.
    rank_bytes = round(weights.rank_bytes(tensor, num_experts) * share)
    own = capacity(model, rank_bytes, gpu_bytes, tensor, workload)
    own = replace(
        own,
        kv_token_bytes=round(own.kv_token_bytes * share),
        num_kv_tokens=round(own.num_kv_tokens / share),
        num_slots=round(own.num_slots / share),
    )
    num_sequences = max(1, min(workload.max_num_seqs, int(own.num_kv_tokens / seq_len)))
    spans_nodes = tensor > nodes.gpus
    if spans_nodes:
        device = replace(device, link_bytes_per_s=NETWORK_BYTES_PER_S, link_latency_s=NETWORK_LATENCY_S)
    whole = model_cost(model, weights, tensor, own.kv_token_bytes / share, workload.dtype_bytes)
    # Each stage has a part of the sequences; a token passes all of them.
    in_stage = max(1, num_sequences // pipeline)
    seconds = StepTime(whole, device, ASSUMED).seconds(StepWork(in_stage, in_stage, in_stage * seq_len))
    hidden = int(model.hf.get("hidden_size") or 0)
    transfer_s = NETWORK_LATENCY_S + in_stage * hidden * workload.dtype_bytes / NETWORK_BYTES_PER_S / tensor
    step_s = seconds + (pipeline - 1) * (ASSUMED.fixed_s + transfer_s)
    return Split(pipeline, tensor, whole_experts, spans_nodes, own, step_s, num_sequences)


def _largest_share(model: ModelConfig, spec: object, pipeline: int) -> float:
    """Return the part of the model that its costliest stage has. Raises ConfigError if it cannot be divided."""
    if pipeline == 1:
        return 1.0
    if not isinstance(spec, DecoderSpec):
        raise ConfigError(f"{model.name} has no stages")
    sizes, costs = divide_layers(model.name, spec, pipeline, model.vision), layer_costs(spec)
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    of_stages = [
        sum(costs[end - size : end]) + (head_cost(spec) if index == len(sizes) - 1 else 0.0)
        for index, (end, size) in enumerate(zip(ends, sizes, strict=True))
    ]
    largest = max(range(len(sizes)), key=of_stages.__getitem__)
    return max(of_stages[largest] / sum(of_stages), max(sizes) / sum(sizes))
