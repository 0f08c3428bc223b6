"""EngineConfig: the configuration that a replica was started with. Frozen, composed, resolved once.

`cluster.config.resolve` makes it from an operator's options and a model directory. A section inherits the declared
options and their defaults; a field that it declares again, by `field()`, is computed from them. Every process of a
replica gets an equal object, and none changes it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple, Self

from .cache_groups import CacheLayout, make_layout
from .errors import ConfigError
from .lora import LoraReference
from .options.sections import (
    CacheOptions,
    ChatOptions,
    ImageOptions,
    LoraOptions,
    ModelOptions,
    ParallelOptions,
    SchedulerOptions,
    StructuredOutputsOptions,
)
from .options.values import parse_directory_size
from .sampling import SamplingDefaults
from .vision import VisionSpec

# Block ids are 28 bits of a table's digest.
MAX_KV_BLOCKS = 1 << 28
# Steps of which the cache of encoder outputs holds the largest images.
ENCODER_CACHE_STEPS = 4
# Work of the encoder in a step, as a share of that of a step full of text: it is computed beside chunks of text.
ENCODER_STEP_SHARE = 0.25
# Most jump-forward tokens of a row in a step, and such tokens that have room beside all rows.
MAX_JUMP_FORWARD_TOKENS = 16


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A linear layer of an embedder (sentence-transformers' Dense), with its own file of weights.

    Attributes:
        folder: folder of the layer inside the model's.
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


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelOptions):
    """ModelConfig from a model directory, with the operator's overrides.

    Attributes:
        path: the Hugging Face model directory.
        name: the name that the model is served under.
        architecture: the first entry of ``architectures`` in config.json, for example ``LlamaForCausalLM``.
        hf: transformers' configuration as a plain dictionary, with defaults filled in.
        eos_token_ids: tokens that end a sequence, from generation_config.json and config.json.
        sampling_defaults: sampling settings for values that a request leaves unset, from generation_config.json.
        hub_id: ORG/NAME of a model on the Hugging Face Hub, of which `path` is a snapshot; empty for a directory.
        commit: commit of the snapshot; empty for a directory.
        generates: the model generates text; False for one whose prompts are only pooled.
        pooling: None for a model whose prompts are not pooled.
        latent_dim: numbers that a token is cached as in each layer of a model with multi-head latent attention, the
            same on every rank; 0 for models that cache keys and values of heads.
        has_states: some layers keep a state of each sequence (see proto.model.state).
        vision: the encoder of a model that reads images; None for text alone.
        sees_whole_prompt: the tokens of a prompt attend to all of it, so that it is computed in one step, and what is
            cached of it depends on the whole; generated tokens attend to those before them.
        kv_layers: KV heads and head dim of each layer with keys and values of its own, which are the first layers;
            empty if these are all layers, with `num_kv_heads` and `head_dim`.
        layer_windows: tokens that a token attends to in each of these layers, 0 for all; empty if no layer has a
            window, or it is not known before the model is loaded, or the layers differ in heads, or prompts see all.
    """

    path: str
    name: str
    architecture: str
    hf: dict[str, Any]
    dtype: str = field()
    max_model_len: int = field()
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    hub_id: str = ""
    commit: str = ""
    generates: bool = True
    pooling: PoolingConfig | None = None
    latent_dim: int = 0
    layer_windows: tuple[int, ...] = ()
    kv_layers: tuple[tuple[int, int], ...] = ()
    has_states: bool = False
    vision: VisionSpec | None = None
    sees_whole_prompt: bool = False

    @property
    def reads_images(self) -> bool:
        """Return whether prompts may have images."""
        return self.vision is not None

    @property
    def num_kv_layers(self) -> int:
        """Number of layers with keys and values of their own."""
        return len(self.kv_layers) or self.num_layers

    def kv_shapes(self, tensor_parallel_size: int) -> list[tuple[int, int, int]]:
        """Return how a rank caches a token in each layer with keys and values of its own; see `kv_shape`."""
        if self.latent_dim or not self.kv_layers:
            return [self.kv_shape(tensor_parallel_size)] * self.num_kv_layers
        return [(2, max(1, heads // tensor_parallel_size), dim) for heads, dim in self.kv_layers]

    def kv_sizes(self, tensor_parallel_size: int) -> tuple[int, ...]:
        """Return the numbers that a rank caches for a token in each of these layers; empty if they are equal."""
        return (
            tuple(map(prod, self.kv_shapes(tensor_parallel_size)))
            if self.kv_layers and not self.latent_dim
            else ()
        )

    def kv_shape(self, tensor_parallel_size: int) -> tuple[int, int, int]:
        """Return how a rank caches a token in a layer: parts, heads, and numbers of each.

        With fewer KV heads than ranks, several ranks hold the same head. All ranks hold a latent in full.
        """
        if self.latent_dim:
            return 1, 1, self.latent_dim
        return 2, max(1, self.num_kv_heads // tensor_parallel_size), self.head_dim


class SwapRates(NamedTuple):
    """Moves of a rank between device and host memory per second, each way; 0 for what has no host memory."""

    blocks_per_s: float = 0.0
    states_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CacheConfig(CacheOptions):
    """The paged KV cache.

    `num_kv_blocks` is None until the ranks have reported their memory, unless it is given.

    Attributes:
        swap_blocks_per_s, swap_states_per_s: blocks, and states of sequences, per second between device and host in
            each direction, measured at start-up.
    """

    swap_blocks_per_s: float = 0.0
    swap_states_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(ParallelOptions):
    """The ranks and their devices. `device` is ``cpu`` or ``cuda``.

    Attributes:
        threads_per_rank: compute threads per rank on a CPU.
        stage_sizes: layers of each pipeline stage; empty with one.
    """

    device: str = field()
    batch_invariant: bool = field()
    threads_per_rank: int
    stage_sizes: tuple[int, ...] = ()

    @property
    def num_kv_partitions(self) -> int:
        """Partitions of the KV pool, whose ranks hold the same blocks; 1 if all ranks of a stage do."""
        return (self.dp_attention_size or self.tensor_parallel_size) if self.enable_dp_attention else 1

    @property
    def logits_processor_names(self) -> tuple[str, ...]:
        """Return the names of custom logits processors, in the order of application."""
        return tuple((self.logits_processors or "").split(",")) if self.logits_processors else ()


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(SchedulerOptions):
    """Limits of a step and of the waiting queue, deadlines, and the order of admission."""

    max_num_seqs: int = field()
    max_num_batched_tokens: int = field()
    max_steps_in_flight: int = field()
    policy: str = field()


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


@dataclass(frozen=True, kw_only=True)
class LoraConfig(LoraOptions):
    """LoRA adapters. `max_cpu_loras` is at least `max_loras`."""

    max_cpu_loras: int = field()

    @property
    def modules(self) -> tuple[LoraReference, ...]:
        """Return the adapters that are read at start-up."""
        return tuple(LoraReference(name, path) for name, path in self.lora_modules)

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Return names, or parts of the paths, of the modules that adapters may change; empty for all."""
        return tuple(self.lora_target_modules.split(",")) if self.lora_target_modules else ()


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
    chat: ChatOptions = field(default_factory=ChatOptions)
    structured_outputs: StructuredOutputsOptions = field(default_factory=StructuredOutputsOptions)
    speculative: SpeculativeConfig | None = None
    lora: LoraConfig | None = None
    images: ImageOptions = field(default_factory=ImageOptions)

    def with_num_blocks(self, num_blocks: int) -> Self:
        """Return the configuration with the pool's number of blocks.

        Raises:
            ConfigError: the pool cannot hold even one block beside the scratch block.
        """
        if num_blocks < 2:
            slots = f", beside {self.cache.num_state_slots:,} state slots" if self.model.has_states else ""
            raise ConfigError(
                f"KV memory holds {num_blocks} blocks of {self.cache.block_size} tokens; at least 2 are needed (one "
                f"is scratch){slots}: give more KV memory"
            )
        return replace(self, cache=replace(self.cache, num_kv_blocks=num_blocks))

    def with_swap_rates(self, rates: Iterable[SwapRates]) -> Self:
        """Return the configuration with the swap rates of the slowest rank."""
        blocks_per_s, states_per_s = map(min, zip(*rates, strict=True))
        measured = {"swap_blocks_per_s": blocks_per_s, "swap_states_per_s": states_per_s}
        return replace(self, cache=replace(self.cache, **measured))

    @property
    def summary(self) -> str:
        """One line for the log: the model, its data types, and how many tokens and sequences fit."""
        model, cache, parallel = self.model, self.cache, self.parallel
        assert cache.num_kv_blocks is not None, "the pool has no size yet"
        num_slots = parallel.num_kv_partitions * (cache.num_kv_blocks - 1) * cache.block_size
        num_sequences = num_slots / self.cache_layout.num_slots(model.max_model_len)
        num_kv_tokens = int(num_sequences * model.max_model_len)
        ranks = f"{parallel.num_ranks} {'rank' if parallel.num_ranks == 1 else 'ranks'}"
        if parallel.stage_sizes:
            ranks += f" in {len(parallel.stage_sizes)} stages of {', '.join(map(str, parallel.stage_sizes))} layers"
        states = ""
        if model.has_states and cache.num_state_slots is not None:
            num_rows = min(self.scheduler.max_num_seqs, cache.num_state_slots - 1)
            num_snapshots = cache.num_state_slots - 1 - num_rows
            states = f", state slots for {num_rows:,} sequences and {num_snapshots:,} snapshots"
            if cache.num_host_state_slots:
                states += f" ({cache.num_host_state_slots:,} more in host memory)"
        kv_dtype = "" if cache.kv_cache_dtype == "auto" else f" in {cache.kv_cache_dtype}"
        return (
            f"{model.name}: {model.architecture} in {model.dtype} on {ranks} ({parallel.device}), "
            f"KV for {num_kv_tokens:,} tokens{kv_dtype}, which are {num_sequences:.1f} sequences of "
            f"{model.max_model_len:,} tokens{states}; at most {self.scheduler.max_num_seqs:,} sequences run at "
            f"once, with {self.scheduler.max_num_batched_tokens:,} tokens per step"
        )

    @property
    def kv_directories(self) -> tuple[tuple[str, int] | None, ...]:
        """The directory of each tier of stored blocks with its bound of bytes; empty if no blocks are stored."""
        cache = self.cache
        places = cache.kv_disk, cache.kv_shared
        if not any(places) or not cache.prefix_caching:
            return ()
        return tuple(None if place is None else parse_directory_size(place) for place in places)

    @property
    def drafts_jump_forward(self) -> bool:
        """Return whether steps draft the text that grammars force, and nothing else.

        With several stages the first one would have to wait for the last one's verdict before it knows the positions
        of the next step.
        """
        is_one_stage = self.parallel.pipeline_parallel_size == 1
        return self.model.generates and self.speculative is None and is_one_stage

    @property
    def encoder_row_bytes(self) -> int:
        """Return the memory of one image token in the cache of encoder outputs, on each rank."""
        vision = self.model.vision
        return 0 if vision is None else vision.row_size * (4 if self.model.dtype == "float32" else 2)

    @property
    def encoder_cache_bytes(self) -> int:
        """Return the memory of encoder outputs on each rank, by default for the image tokens of several steps."""
        if self.cache.encoder_cache_memory is not None:
            return self.cache.encoder_cache_memory
        return ENCODER_CACHE_STEPS * self.scheduler.max_num_batched_tokens * self.encoder_row_bytes

    @property
    def encoder_step_work(self) -> int:
        """Return the multiplications of the encoder of images in a step, beside its tokens.

        They are a share of those of `max_num_batched_tokens` of text, for which a transformer has about 12 squares of
        its hidden size per layer (4 of attention, 8 of the feed-forward network; mixtures of experts compute
        as many).
        """
        vision, model = self.model.vision, self.model
        if vision is None:
            return 0
        per_token = 12 * model.num_layers * vision.embedding_size**2
        return max(1, int(ENCODER_STEP_SHARE * self.scheduler.max_num_batched_tokens * per_token))

    @property
    def max_decode_tokens(self) -> int:
        """Return the tokens of the largest step that only decodes, drafted ones included.

        Jump-forward tokens have room beside all rows, also if there is one. Drafts have up to half of what rows
        leave of a step.
        """
        num_rows, num_left = self.scheduler.max_num_seqs, self.scheduler.max_num_batched_tokens
        num_left = max(0, num_left - num_rows)
        if self.speculative is not None:
            return num_rows + min(num_rows * self.speculative.num_speculative_tokens, num_left // 2)
        return num_rows + (min(MAX_JUMP_FORWARD_TOKENS, num_left) if self.drafts_jump_forward else 0)

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
    def max_useful_blocks(self) -> int:
        """Blocks that the longest sequences and prefixes in all state slots have; without states a pool's bound."""
        num_slots = self.cache.num_state_slots
        if not self.model.has_states or num_slots is None:
            return MAX_KV_BLOCKS
        return min(MAX_KV_BLOCKS, 1 + num_slots * self.max_blocks_per_seq * len(self.cache_layout.groups))

    @property
    def max_servable_tokens(self) -> int:
        """Maximum number of tokens of prompt and output: limited by the context length and by the pool."""
        cache, step_tokens = self.cache, self.scheduler.max_num_batched_tokens
        if cache.num_kv_blocks is None:
            return self.model.max_model_len
        num_blocks = self.cache_layout.max_blocks_per_seq(
            cache.num_kv_blocks - 1, self.max_blocks_per_seq, step_tokens, cache.block_size
        )
        return min(self.model.max_model_len, num_blocks * cache.block_size)
