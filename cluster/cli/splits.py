"""Candidate splits of a model over GPUs and nodes: their memory and the time of a step, from a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...proto.config import ModelConfig
from ...proto.errors import ConfigError
from ...proto.model.divide_layers import divide_layers, head_cost, layer_costs
from ...proto.model.registry import check_dp_attention, check_supported
from ...proto.model.spec import DecoderSpec
from ...scheduler import StepWork
from ...worker import WeightSize
from ..config.capacity import Capacity, Workload, capacity
from ..simulation.engine import model_cost
from ..simulation.step_time import ASSUMED, Device, StepTime

# Of a layer whose tokens travel: to the experts, and back.
_NUM_WAYS = 2
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
        attention_groups: groups of a stage's ranks that attend each for sequences of its own, whose tokens travel to
            the experts of all; 1 if all ranks attend for all.
        spans_nodes: ranks that sum after every layer are on several nodes.
        capacity: of the stage with the most weights; the tokens that fit are those of all stages.
        step_s: for one token of each of `num_sequences`; of what fits.
    """

    pipeline: int
    tensor: int
    whole_experts: bool
    attention_groups: int
    spans_nodes: bool
    capacity: Capacity
    step_s: float
    num_sequences: int

    @property
    def fits(self) -> bool:
        return self.capacity.num_kv_tokens > 0

    @property
    def tokens_per_s(self) -> float:
        """Return the generated tokens of all sequences per second."""
        return self.num_sequences / self.step_s


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
    found, divides_sequences = [], True
    try:
        check_dp_attention(model)
    except ConfigError:
        divides_sequences = False
    for tensor in range(1, nodes.count * nodes.gpus + 1):
        if tensor > nodes.gpus and tensor % nodes.gpus:
            continue
        for pipeline in range(1, nodes.count * nodes.gpus // tensor + 1):
            if not _fills_nodes(pipeline, tensor, nodes):
                continue
            # Attention is each GPU's own, or shared within a node.
            groups = {tensor, max(1, tensor // nodes.gpus)} - {1} if divides_sequences else set[int]()
            for kind in [(False, 1), (True, 1), *((True, count) for count in sorted(groups))]:
                sizes = pipeline, tensor, *kind
                split = _try_split(model, weights, nodes, device, gpu_bytes, workload, seq_len, sizes)
                if split is not None:
                    found.append(split)
    return sorted(found, key=lambda split: (split.pipeline * split.tensor, split.pipeline))


def best_split(splits: Sequence[Split]) -> Split | None:
    """Return the split that fits with the fewest GPUs, sums within nodes if possible, and most tokens per second."""
    fitting = [split for split in splits if split.fits]
    return min(
        fitting,
        key=lambda split: (split.pipeline * split.tensor, split.spans_nodes, -split.tokens_per_s),
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
    sizes: tuple[int, int, bool, int],
) -> Split | None:
    """Return a split. Returns None if the model cannot be divided so.

    Args:
        sizes: the first four attributes of Split.
    """
    pipeline, tensor, whole_experts, groups = sizes
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
    travels, sharers = groups > 1, tensor // groups
    whole_bytes = weights.rank_bytes(
        tensor, num_experts, attention_ranks=sharers if travels else None, sends_tokens=travels
    )
    own = capacity(model, round(whole_bytes * share), gpu_bytes, tensor, workload, groups)
    own = replace(
        own,
        kv_token_bytes=round(own.kv_token_bytes * share),
        num_kv_tokens=round(own.num_kv_tokens / share),
        num_slots=round(own.num_slots / share),
    )
    num_sequences = max(1, min(workload.max_num_seqs, int(own.num_kv_tokens / seq_len)))
    over_network = replace(device, link_bytes_per_s=NETWORK_BYTES_PER_S, link_latency_s=NETWORK_LATENCY_S)
    spans_nodes = sharers > nodes.gpus
    whole = model_cost(model, weights, tensor, own.kv_token_bytes / share, workload.dtype_bytes)
    # Each stage has a part of the sequences; a token passes all of them.
    in_stage = max(1, num_sequences // pipeline)
    hidden = int(model.hf.get("hidden_size") or 0)
    exchange_s = 0.0
    if travels:
        # A group sums for its own tokens; what it holds besides the experts, it reads in every step.
        more_bytes = whole_bytes - weights.rank_bytes(tensor, num_experts)
        whole = replace(
            whole,
            weight_bytes=whole.weight_bytes + more_bytes,
            num_all_reduces=whole.num_all_reduces if sharers > 1 else 0,
            all_reduce_bytes_per_token=whole.all_reduce_bytes_per_token / groups,
        )
        link = over_network if tensor > nodes.gpus else device
        most = int(model.hf.get("num_experts_per_tok") or 1)
        num_sent = -(-in_stage // tensor) * min(tensor - 1, most)
        sent_s = num_sent * hidden * workload.dtype_bytes / link.link_bytes_per_s
        exchange_s = _NUM_WAYS * model.num_layers * (link.link_latency_s + sent_s) * ASSUMED.all_reduce
    work = StepWork(in_stage, in_stage, -(-in_stage // groups) * seq_len)
    seconds = exchange_s + StepTime(whole, over_network if spans_nodes else device, ASSUMED).seconds(work)
    transfer_s = NETWORK_LATENCY_S + in_stage * hidden * workload.dtype_bytes / NETWORK_BYTES_PER_S / tensor
    step_s = seconds + (pipeline - 1) * (ASSUMED.fixed_s + transfer_s)
    return Split(pipeline, tensor, whole_experts, groups, spans_nodes, own, step_s, num_sequences)


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
