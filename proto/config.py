"""EngineConfig: the configuration that a replica was started with. Frozen, composed, resolved once.

`cluster.config.resolve` makes it from an operator's options, which hold the defaults, and a model directory. Every
process of a replica gets an equal object, and none changes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from .cache_groups import CacheLayout, make_layout
from .errors import ConfigError
from .lora import LoraReference
from .sampling import SamplingDefaults

# Most forced tokens (jump-forward) of a row in a step, and such tokens that have room beside all rows.
MAX_FORCED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A linear layer of an embedder (sentence-transformers' Dense), with its own file of weights.

    Attributes:
        folder: of the layer, inside that of the model.
        activation: after the layer: ``none``, ``tanh``, ``relu``, ``gelu``, ``silu`` or ``sigmoid``.
    """

    folder: str
    in_features: int
    out_features: int
    has_bias: bool = True
    activation: str = "none"


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """The way from the hidden states of a prompt to one vector: pooling, then a head, then an activation.

    Attributes:
        pooling_type: hidden state that is taken: ``last`` or ``cls`` (the first), or their ``mean``.
        labels: names of the classes that the head scores; empty for a model that embeds.
        activation: ``normalize``, ``sigmoid``, ``softmax`` or ``none``.
        token_ids: the head's class is a token of the vocabulary, scored by its logit, less that of a second token if
            there is one; empty for a head of its own.
        dimensions: lengths to which an embedding may be cut; empty for all.
        hidden_size: numbers of a hidden state.
        dense: the layers that the pooled hidden state passes to become an embedding.
    """

    pooling_type: str
    hidden_size: int
    labels: tuple[str, ...] = ()
    activation: str = "none"
    token_ids: tuple[int, ...] = ()
    dimensions: tuple[int, ...] = ()
    dense: tuple[DenseConfig, ...] = ()

    @property
    def embedding_size(self) -> int:
        """Numbers of a whole embedding."""
        return self.dense[-1].out_features if self.dense else self.hidden_size

    @property
    def classifies(self) -> bool:
        return bool(self.labels)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """ModelConfig from a model directory, with the operator's overrides.

    Attributes:
        path: the Hugging Face model directory.
        name: the name that the model is served under.
        architecture: the first entry of ``architectures`` in config.json, for example ``LlamaForCausalLM``.
        hf: transformers' configuration as a plain dictionary, with defaults filled in.
        dtype: data type of activations: ``float32``, ``bfloat16`` or ``float16``.
        max_model_len: maximum number of tokens of prompt and output together.
        eos_token_ids: tokens that end a sequence, from generation_config.json and config.json.
        sampling_defaults: sampling settings for values that a request leaves unset, from generation_config.json.
        seed: seed of the generator of seeds for requests without one.
        quantization: quantizes the weights of a full-precision checkpoint when they are loaded: ``int8`` or
            ``fp8``; None to keep the checkpoint's type.
        hub_id: ORG/NAME of a model on the Hugging Face Hub, of which `path` is a snapshot; empty for a directory.
        commit: of the snapshot; empty for a directory.
        generates: the model generates text; False for one whose prompts are only pooled.
        pooling: None for a model whose prompts are not pooled.
        latent_dim: numbers that a token is cached as in each layer of a model with multi-head latent attention, the
            same on every rank; 0 for models that cache keys and values of heads.
        kv_layers: KV heads and head dim of each layer with keys and values of its own, which are the first layers;
            empty if these are all layers, with `num_kv_heads` and `head_dim`.
        layer_windows: tokens that a token attends to in each of these layers, 0 for all; empty if no layer has a
            window, or it is not known before the model is loaded, or the layers differ in heads.
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
    hub_id: str = ""
    commit: str = ""
    generates: bool = True
    pooling: PoolingConfig | None = None
    latent_dim: int = 0
    layer_windows: tuple[int, ...] = ()
    kv_layers: tuple[tuple[int, int], ...] = ()

    @property
    def num_kv_layers(self) -> int:
        """Number of layers with keys and values of their own."""
        return len(self.kv_layers) or self.num_layers

    def kv_shapes(self, tensor_parallel_size: int) -> list[tuple[int, int, int]]:
        """Return how a rank caches a token in each layer with keys and values of its own; see `kv_shape`."""
        if not self.kv_layers:
            return [self.kv_shape(tensor_parallel_size)] * self.num_layers
        return [(2, max(1, heads // tensor_parallel_size), dim) for heads, dim in self.kv_layers]

    def kv_sizes(self, tensor_parallel_size: int) -> tuple[int, ...]:
        """Return the numbers that a rank caches for a token in each of these layers; empty if they are equal."""
        return tuple(map(prod, self.kv_shapes(tensor_parallel_size))) if self.kv_layers else ()

    def kv_shape(self, tensor_parallel_size: int) -> tuple[int, int, int]:
        """Return how a rank caches a token in a layer: parts, heads, and numbers of each.

        With fewer KV heads than ranks, several ranks hold the same head. All ranks hold a latent in full.
        """
        if self.latent_dim:
            return 1, 1, self.latent_dim
        return 2, max(1, self.num_kv_heads // tensor_parallel_size), self.head_dim


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache.

    Attributes:
        block_size: tokens per block.
        num_blocks: blocks of each rank, block 0 (scratch for padding rows) included; None until the ranks
            have reported their memory. A block holds tokens of one cache group.
        memory_bytes: bytes of KV cache per rank; None to use ``gpu_memory_utilization`` on a GPU and
            ``DEFAULT_CPU_KV_BYTES`` on a CPU.
        gpu_memory_utilization: share of a GPU's memory for weights, activations and KV together.
        prefix_caching: keep computed blocks for later requests with the same prefix.
        num_host_blocks: blocks of host memory for evicted and preempted blocks; 0 for no host tier.
        swap_blocks_per_s: blocks per second between device and host in each direction, measured at start-up.
        kv_dtype: data type of stored keys and values: ``auto`` (the model's dtype), or ``fp8_e4m3`` or ``int8``
            with a scale per token and head.
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
    """The ranks and their devices.

    Attributes:
        tensor_parallel_size: ranks that share each layer.
        device: ``cpu`` or ``cuda``.
        threads_per_rank: compute threads per rank on a CPU.
        cuda_graphs: on a GPU, capture decode steps as CUDA graphs and replay them.
        batch_invariant: on a GPU, attention sums a sequence's values in an order that does not depend on other
            sequences; slower for few long sequences.
        fused_all_reduce: on GPUs of one host, steps of few tokens all-reduce in the op that adds the residual and
            normalizes.
        attention_backend: on a GPU, ``flash_attn`` computes the attention of prompts by FlashAttention 3; ``triton``
            computes all attention by the kernels of quire.
        spare_processes: idle processes on each node, for ranks and schedulers that are replaced.
        logits_processors: names of custom logits processors, separated by commas; None for none.
        enable_expert_parallel: of a mixture of experts, each rank holds some experts whole.
        standby_weights: on a CPU, the weights and the KV of each rank are in memory that the process that replaces it
            maps.
        enable_dp_attention: each rank has the whole attention of a latent model, and the sequences of one partition
            of the KV pool (data-parallel attention); the rest of the model is tensor-parallel.
    """

    tensor_parallel_size: int
    device: str
    threads_per_rank: int
    cuda_graphs: bool
    batch_invariant: bool
    fused_all_reduce: bool
    attention_backend: str = "triton"
    spare_processes: int = 0
    logits_processors: str | None = None
    enable_expert_parallel: bool = False
    standby_weights: bool = False
    enable_dp_attention: bool = False

    @property
    def num_kv_partitions(self) -> int:
        """Partitions of the KV pool, each with the memory of one rank; 1 if all ranks hold the same blocks."""
        return self.tensor_parallel_size if self.enable_dp_attention else 1

    @property
    def logits_processor_names(self) -> tuple[str, ...]:
        """Return the names of custom logits processors, in the order of application."""
        return tuple((self.logits_processors or "").split(",")) if self.logits_processors else ()


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of the waiting queue, deadlines, and the admission policy.

    Attributes:
        max_num_seqs: number of rows, that is of sequences that run at once.
        max_num_batched_tokens: token budget of a step; decoding rows first, then chunks of prompts.
        max_queue_len: length of the waiting queue from which new requests are refused (RESOURCE_EXHAUSTED).
        max_steps_in_flight: steps planned before the first one's result arrives: 2 overlaps the scheduler with the
            workers; 1 if both share a thread.
        step_timeout_s: a step without a result this long after its expected end has a hung rank; a rank whose process
            does not answer is found earlier.
        audit: recount every block after each step (`check_integrity`).
        policy: order of admission: ``fcfs``, ``priority``, ``fair`` (between tenants), ``shortest-prefill`` or
            ``longest-prefix``.
        max_logprobs: most log-probabilities per token that a request may ask for; -1 for no limit.
        tenant_weights: (tenant, share) of the fair policy; other tenants have share 1.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_queue_len: int
    max_steps_in_flight: int
    step_timeout_s: float
    audit: bool
    policy: str
    max_logprobs: int
    tenant_weights: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """Conversations: their template, and the formats of the model's output.

    Attributes:
        chat_template: a template instead of the model's own.
        trust_request_chat_template: requests may bring templates of their own.
        tool_call_parser, reasoning_parser: names of formats; ``auto`` for what the chat template shows, ``none`` for
            none.
    """

    chat_template: str | None = None
    trust_request_chat_template: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"


@dataclass(frozen=True, slots=True)
class StructuredOutputsConfig:
    """Structured outputs.

    Attributes:
        structured_outputs_backend: ``xgrammar``, ``guidance``, or ``auto`` for the first that supports a constraint.
        disable_any_whitespace, disable_additional_properties: for all requests, see StructuredOutputsParams.
    """

    structured_outputs_backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding.

    Attributes:
        method: source of the drafted tokens: ``ngram``, the sequence itself, ``draft_model``, or a head that reads
            the target model's hidden states: ``eagle3``, or ``mtp`` for that of its own checkpoint.
        num_speculative_tokens: most drafted tokens per row and step.
        prompt_lookup_min: shortest suffix of the sequence whose earlier occurrence is continued.
        prompt_lookup_max: longest suffix that is searched for; None for no limit.
        draft: the draft model or the head, with the layers that need KV memory; None for ngram.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_min: int = 1
    prompt_lookup_max: int | None = None
    draft: ModelConfig | None = None

    @property
    def has_head(self) -> bool:
        """Return whether drafts need the hidden states of the target model."""
        return self.method in ("eagle3", "mtp")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """LoRA adapters.

    Attributes:
        max_loras: slots on the device, that is adapters that a step may use.
        max_lora_rank: largest rank of an adapter.
        max_cpu_loras: adapters in host memory, at least `max_loras`.
        modules: adapters that are read at start-up.
        target_modules: names, or parts of the paths, of the modules that adapters may change; empty for all.
    """

    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    modules: tuple[LoraReference, ...] = ()
    target_modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The whole configuration of a replica.

    Attributes:
        speculative: None without speculative decoding.
        lora: None without adapters.
    """

    model: ModelConfig
    cache: CacheConfig
    parallel: ParallelConfig
    scheduler: SchedulerConfig
    chat: ChatConfig = field(default_factory=ChatConfig)
    structured_outputs: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    speculative: SpeculativeConfig | None = None
    lora: LoraConfig | None = None

    def with_num_blocks(self, num_blocks: int) -> EngineConfig:
        """Return the configuration with the pool's number of blocks.

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
        """Return the configuration with the measured swap rate of the host tier."""
        return replace(self, cache=replace(self.cache, swap_blocks_per_s=blocks_per_s))

    @property
    def drafts_forced_text(self) -> bool:
        """Return whether steps draft the text that grammars force, and nothing else."""
        return self.model.generates and self.speculative is None

    @property
    def max_decode_tokens(self) -> int:
        """Return the tokens of the largest step that only decodes, drafted ones included.

        Forced text has room beside all rows, also if there is one. Drafts have up to half of what rows
        leave of a step.
        """
        num_rows, num_left = self.scheduler.max_num_seqs, self.scheduler.max_num_batched_tokens
        num_left = max(0, num_left - num_rows)
        if self.speculative is not None:
            return num_rows + min(num_rows * self.speculative.num_speculative_tokens, num_left // 2)
        return num_rows + (min(MAX_FORCED_TOKENS, num_left) if self.drafts_forced_text else 0)

    @property
    def speculative_draft(self) -> ModelConfig | None:
        """The draft model or head; None without one."""
        return None if self.speculative is None else self.speculative.draft

    @property
    def cache_layout(self) -> CacheLayout:
        """The cache groups of the model."""
        model, draft, draft_layers = self.model, self.speculative_draft, 0.0
        if draft is not None:
            draft_layers = draft.num_layers * prod(draft.kv_shape(1)) / prod(model.kv_shape(1))
        sizes = model.kv_sizes(self.parallel.tensor_parallel_size)
        return make_layout(model.num_kv_layers, model.layer_windows, model.max_model_len, draft_layers, sizes)

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.model.max_model_len // self.cache.block_size)

    @property
    def max_servable_tokens(self) -> int:
        """Maximum number of tokens of prompt and output: limited by the context length and by the pool."""
        cache, step_tokens = self.cache, self.scheduler.max_num_batched_tokens
        if cache.num_blocks is None:
            return self.model.max_model_len
        num_blocks = self.cache_layout.max_blocks_per_seq(
            cache.num_blocks - 1, self.max_blocks_per_seq, step_tokens, cache.block_size
        )
        return min(self.model.max_model_len, num_blocks * cache.block_size)
