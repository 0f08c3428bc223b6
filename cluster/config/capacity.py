"""Capacity: the KV cache that fits beside a model's weights on GPUs of a given memory, as arithmetic."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from ...proto.cache_groups import CacheLayout, make_layout
from ...proto.config import ENCODER_CACHE_STEPS, ModelConfig
from ...proto.errors import ConfigError
from ...proto.model.quantization import read_quantization
from ...proto.model.registry import state_layers
from ...proto.model.state import state_bytes
from ...proto.state_memory import choose_num_slots

GIB = 1 << 30
# CUDA's context, NCCL's buffers, kernels and graphs of one rank.
FIXED_BYTES = 3 * GIB // 2
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Workload:
    """Limits of a step, which determine the memory of activations.

    Attributes:
        utilization: share of a GPU's memory that quire may use.
        kv_bytes: bytes of a number in the KV cache; quantized ones have a 4-byte scale per token and head besides.
        shares_encoder: the ranks share the layers of an encoder of images; otherwise each of them holds it whole.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    utilization: float
    dtype_bytes: int
    kv_bytes: int
    shares_encoder: bool = True


@dataclass(frozen=True, slots=True)
class Capacity:
    """Memory of one rank, and the tokens that a replica holds.

    Attributes:
        weight_bytes: bytes of one rank's weights, with those of an encoder of images.
        lora_bytes: bytes of one rank's slots for adapters.
        kv_token_bytes: bytes of one token on one rank, the mean of a sequence as long as the context: layers with a
            window keep its last tokens only.
        num_kv_tokens: tokens of such sequences in the whole replica; 0 if the weights do not fit.
        num_slots: tokens of all blocks, each of which holds the layers of one cache group.
        state_bytes: bytes of one sequence's state on one rank; 0 for a model without states.
        num_state_slots: states of sequences and of snapshots that fit beside the KV, and a scratch slot.
    """

    tensor_parallel_size: int
    weight_bytes: int
    kv_token_bytes: int
    num_kv_tokens: int
    num_slots: int
    layout: CacheLayout
    lora_bytes: int = 0
    state_bytes: int = 0
    num_state_slots: int = 0

    def concurrency(self, num_tokens: int) -> float:
        """Return how many sequences of that length fit at once."""
        by_blocks = self.num_slots / self.layout.num_slots(num_tokens)
        return min(by_blocks, self.num_state_slots - 1) if self.state_bytes else by_blocks


def capacity(
    model: ModelConfig,
    rank_bytes: int,
    gpu_bytes: int,
    tensor_parallel_size: int,
    workload: Workload,
    num_kv_partitions: int = 1,
    lora_bytes: int = 0,
) -> Capacity:
    """Return the capacity of a replica.

    Args:
        rank_bytes: bytes of one rank's weights.
        gpu_bytes: memory of one GPU.
        num_kv_partitions: ranks that hold the KV of sequences of their own; 1 if all hold that of the same sequences.
        lora_bytes: bytes of one rank's slots for adapters.
    """
    scale_bytes = _FLOAT32_BYTES if workload.kv_bytes < workload.dtype_bytes else 0
    of_layers = [
        num_parts * num_heads * (dim * workload.kv_bytes + scale_bytes)
        for num_parts, num_heads, dim in model.kv_shapes(tensor_parallel_size)
    ]
    sizes = model.kv_sizes(tensor_parallel_size)
    layout = make_layout(model.num_kv_layers, model.layer_windows, model.max_model_len, 0, sizes)
    # With one group a block has all layers, which may differ; otherwise places for the largest.
    slot_bytes = sum(of_layers) if len(layout.groups) == 1 else layout.layers_per_block * max(of_layers)
    slots_per_token = layout.num_slots(model.max_model_len) / model.max_model_len
    rank_bytes += _encoder_bytes(model, tensor_parallel_size, workload)
    used = (
        rank_bytes
        + _embedding_bytes(model, workload)
        + lora_bytes
        + FIXED_BYTES
        + _activation_bytes(model, tensor_parallel_size, workload)
    )
    num_free = int(gpu_bytes * workload.utilization) - used
    own_state_bytes = state_bytes(state_layers(model, tensor_parallel_size), workload.dtype_bytes)
    num_state_slots = 0
    if own_state_bytes and num_free > 0:
        kv_bytes = slot_bytes * round(layout.num_slots(model.max_model_len)) * workload.max_num_seqs
        with suppress(ConfigError):
            num_state_slots = choose_num_slots(
                model.name, workload.max_num_seqs, own_state_bytes, kv_bytes, num_free
            )
        num_free = num_free - num_state_slots * own_state_bytes if num_state_slots else 0
    num_slots = num_kv_partitions * max(0, num_free // slot_bytes)
    return Capacity(
        tensor_parallel_size,
        rank_bytes,
        round(slot_bytes * slots_per_token),
        int(num_slots / slots_per_token),
        num_slots,
        layout,
        lora_bytes,
        own_state_bytes,
        num_state_slots,
    )


def _encoder_bytes(model: ModelConfig, tensor_parallel_size: int, workload: Workload) -> int:
    """Return the bytes of one rank's part of an encoder of images; 0 for a model that reads none.

    The encoder of a quantized checkpoint is counted in full precision, which most of them have.

    Raises:
        ConfigError: the quantization is not supported, or cannot be read.
    """
    if model.vision is None:
        return 0
    quantization = read_quantization(model)
    is_shared = workload.shares_encoder and (quantization is None or quantization.is_online)
    return model.vision.rank_parameters(tensor_parallel_size if is_shared else 1) * workload.dtype_bytes


def _embedding_bytes(model: ModelConfig, workload: Workload) -> int:
    """Return the bytes of the cache of encoder outputs; 0 for a model that reads no images."""
    if model.vision is None:
        return 0
    num_rows = ENCODER_CACHE_STEPS * workload.max_num_batched_tokens
    return num_rows * model.vision.row_size * workload.dtype_bytes


def _activation_bytes(model: ModelConfig, tensor_parallel_size: int, workload: Workload) -> int:
    """Return an estimate: the widest layer's inputs and outputs, and the logits with a copy for sampling."""
    hidden = _size(model, "hidden_size") or model.num_heads * model.head_dim
    intermediate = _size(model, "intermediate_size") or 4 * hidden
    width = 4 * hidden + 3 * -(-intermediate // tensor_parallel_size)
    layer = workload.max_num_batched_tokens * width * workload.dtype_bytes
    logits = 2 * workload.max_num_seqs * model.vocab_size * _FLOAT32_BYTES
    return layer + logits


def _size(model: ModelConfig, field: str) -> int:
    """Return a size of the configuration, the largest if layers differ; 0 if it states none."""
    given = model.hf.get(field)
    sizes = given if isinstance(given, list) else [given]
    return max((size for size in sizes if isinstance(size, int)), default=0)
