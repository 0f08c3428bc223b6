"""EngineConfig: the configuration that a replica was started with. Frozen, composed, resolved once.

`cluster.config.resolve` makes it from an operator's options, which hold the defaults, and a model directory. Every
process of a replica is handed the same object and none changes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .errors import ConfigError
from .sampling import SamplingDefaults


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model as its directory describes it.

    Attributes:
        path: the Hugging Face model directory.
        name: the name it is served under.
        architecture: the first entry of ``architectures`` in config.json, for example ``LlamaForCausalLM``.
        hf: transformers' configuration as a plain dictionary, defaults filled in.
        dtype: what is computed in: ``float32``, ``bfloat16`` or ``float16``.
        max_model_len: most tokens of prompt and answer together.
        eos_token_ids: tokens that end a sequence, from generation_config.json and config.json.
        sampling_defaults: how requests sample that say nothing else, from generation_config.json.
        seed: where seeds of requests without one are drawn from.
        quantization: what the weights of a full-precision checkpoint become as they are read: ``int8`` or ``fp8``;
            None: what they are.
    """

    path: str
    name: str
    architecture: str
    hf: dict[str, Any]
    dtype: str
    max_model_len: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    seed: int = 0
    quantization: str | None = None


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache.

    Attributes:
        block_size: tokens a block.
        num_blocks: blocks of the pool, block 0 (scratch for padding rows) included; None until the ranks
            have reported their memory.
        memory_bytes: KV bytes a rank may take; None: ``gpu_memory_utilization`` decides on a GPU, and
            ``DEFAULT_CPU_KV_BYTES`` on a CPU.
        gpu_memory_utilization: share of a GPU's memory for weights, activations and KV together.
        prefix_caching: keep computed blocks for later requests with the same beginning.
        num_host_blocks: blocks of host memory that evicted and preempted blocks go to; 0: none.
        swap_blocks_per_s: blocks that move between device and host a second, each way, as measured at the start.
        kv_dtype: what keys and values are stored in: ``auto`` (what the model computes in), or ``fp8_e4m3`` or
            ``int8`` with a scale for each token and head.
    """

    block_size: int
    num_blocks: int | None
    memory_bytes: int | None
    gpu_memory_utilization: float
    prefix_caching: bool
    num_host_blocks: int
    kv_dtype: str
    swap_blocks_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How many ranks, on what.

    Attributes:
        tensor_parallel_size: ranks that share each layer.
        device: ``cpu`` or ``cuda``.
        threads_per_rank: compute threads a rank on a CPU.
        cuda_graphs: decode steps on a GPU are recorded and replayed.
        batch_invariant: attention on a GPU sums a sequence's values in an order that no other sequence changes, at
            some cost where few long ones run.
        fused_all_reduce: ranks on GPUs of one host sum few tokens in the op that adds and normalises the sum.
    """

    tensor_parallel_size: int
    device: str
    threads_per_rank: int
    cuda_graphs: bool
    batch_invariant: bool
    fused_all_reduce: bool


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one step may hold and how long things may take.

    Attributes:
        max_num_seqs: rows, that is sequences that run at once.
        max_num_batched_tokens: the token budget of a step, decoding rows first, then chunks of prompts.
        max_queue_len: waiting requests beyond which new ones are refused (RESOURCE_EXHAUSTED).
        max_steps_in_flight: steps planned before the first one's result is in: 2 hides the scheduler's time
            behind the workers', 1 where both share a thread.
        step_timeout_s: a step without a result for this long has a hung rank.
        audit: recount every block after each step (`check_integrity`).
        policy: the order of admission: ``fcfs``, ``priority``, ``fair`` (between tenants), ``shortest-prefill``
            or ``longest-prefix``.
        tenant_weights: (tenant, share) of the fair policy; tenants not named have 1.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_queue_len: int
    max_steps_in_flight: int
    step_timeout_s: float
    audit: bool
    policy: str
    tenant_weights: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All of a replica's configuration."""

    model: ModelConfig
    cache: CacheConfig
    parallel: ParallelConfig
    scheduler: SchedulerConfig

    def with_num_blocks(self, num_blocks: int) -> EngineConfig:
        """The same configuration with the pool's size filled in.

        Raises:
            ConfigError: the pool cannot hold even one block beside the scratch block.
        """
        if num_blocks < 2:
            raise ConfigError(
                f"KV memory holds {num_blocks} blocks of {self.cache.block_size} tokens; at least 2 are needed "
                "(one is scratch): give more KV memory"
            )
        return replace(self, cache=replace(self.cache, num_blocks=num_blocks))

    def with_swap_rate(self, blocks_per_s: float) -> EngineConfig:
        """The same configuration with the measured speed of the host tier filled in."""
        return replace(self, cache=replace(self.cache, swap_blocks_per_s=blocks_per_s))

    @property
    def num_kv_heads_per_rank(self) -> int:
        """Where there are fewer KV heads than ranks, several ranks hold the same one."""
        return max(1, self.model.num_kv_heads // self.parallel.tensor_parallel_size)

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.model.max_model_len // self.cache.block_size)

    @property
    def max_servable_tokens(self) -> int:
        """Prompt plus answer that fit: bounded by the context and by the whole pool."""
        if self.cache.num_blocks is None:
            return self.model.max_model_len
        return min(self.model.max_model_len, (self.cache.num_blocks - 1) * self.cache.block_size)
