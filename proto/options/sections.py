"""The declared options of an engine, in the sections of EngineConfig.

EngineOptions is all of these sections: what an operator chose. A section of EngineConfig inherits one of them and
declares the values again that `resolve` has to fill in, so that an option is declared here alone.
"""

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

from .option import option
from .values import (
    DEFAULT_FRAMES,
    DIRECTORY_SIZE,
    FILE_NAME,
    JSON_OBJECT,
    LORA_MODULES,
    MAX_IMAGES,
    NAMES,
    NUM_BYTES,
    PLACE_SIZE,
    amounts,
    at_least,
    between,
    check_lora_modules,
    check_target_modules,
    image_limits,
    json_object,
    media_domains,
    one_of,
    positive,
    positive_amounts,
    positive_finite,
    positive_up_to,
    processor_names,
    share,
    zmq_endpoint,
)

DEVICES = ("cpu", "cuda")
# Dtype of weights and of what is computed |-> bytes of an element.
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATE_DTYPES = ("float32", "bfloat16")
# Ways of a mixture's tokens to the ranks that have their experts.
ALL_REDUCE, ALL_TO_ALL = "all_reduce", "all_to_all"
DEEPEP_HIGH_THROUGHPUT, DEEPEP_LOW_LATENCY = "deepep_high_throughput", "deepep_low_latency"
NIXL = "nixl"
GRAMMAR_BACKENDS = ("xgrammar", "guidance")
MAX_BLOCK_SIZE = 1024
# Far above what serves well; more would only fail later, when every rank allocates its rows and buffers.
MAX_NUM_SEQS = 1 << 14
MAX_NUM_BATCHED_TOKENS = 1 << 20
MAX_STEPS_IN_FLIGHT = 8
MAX_SPARE_PROCESSES = 64
MAX_LORAS = 1024
MAX_LORA_RANK = 512

# Options by the panel of --help that shows them.
model_option, execution_option, _chat_option = (
    partial(option, group=group) for group in ("Model", "Execution", "Chat")
)
_kv_option, _scheduling_option, _constraint_option, _lora_option, _image_option = (
    partial(option, group=group)
    for group in ("KV cache", "Scheduling", "Structured outputs", "LoRA adapters", "Images")
)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The types of a model's numbers, the length of its sequences, and its seed."""

    dtype: str = model_option(
        "auto",
        help="Type of activations and of weights that are not quantized; auto is float32 on a CPU and the "
        "checkpoint's type on a GPU.",
        check=one_of("auto", *DTYPES),
    )
    quantization: str | None = model_option(
        None,
        help="Quantize full-precision weights while they are loaded. Quantized checkpoints need no option.",
        check=one_of("int8", "fp8"),
    )
    mamba_ssm_cache_dtype: str = model_option(
        "auto",
        help="Type of the recurrent states of models whose layers keep one of each sequence; auto is float32. "
        "bfloat16 takes half of the memory; each step rounds its states, so that outputs depend on where chunks end.",
        check=one_of("auto", *STATE_DTYPES),
    )
    max_model_len: int | None = model_option(
        None,
        help="Longest sequence, prompt and output together. Default: the model's context length.",
        unit="tokens",
        check=at_least(2),
    )
    language_model_only: bool = model_option(
        False, help="Of a model that reads images, load and serve the text model alone."
    )
    skip_tokenizer_init: bool = model_option(
        False,
        help="Serve token ids alone, without the model's tokenizer: prompts are token ids, outputs have no text.",
    )
    seed: int = model_option(0, help="Base seed; requests without a seed of their own draw theirs from it.")


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """The ranks: their devices, and what they compute how."""

    tensor_parallel_size: int = execution_option(
        1, help="Ranks that share each layer.", unit="ranks", check=at_least(1)
    )
    pipeline_parallel_size: int = execution_option(
        1,
        help="Stages of adjacent layers, each on tensor_parallel_size ranks of its own, which pass hidden states on: "
        "for models that are larger than a machine (on CPUs only so far).",
        unit="stages",
        check=at_least(1),
    )
    enable_expert_parallel: bool = execution_option(
        False, help="Of a mixture of experts, each rank holds some experts whole, instead of a part of each."
    )
    all2all_backend: str = execution_option(
        ALL_REDUCE,
        help="Of whole experts, how tokens reach them: all_reduce computes all tokens on every rank and sums; "
        "all_to_all sends each token to the ranks of its experts and back, over shared memory, TCP or NCCL; "
        "deepep_high_throughput and deepep_low_latency do so by DeepEP, which must be installed (not yet run on a "
        "GPU). With enable_dp_attention a rank keeps the hidden states of its own tokens alone.",
        check=one_of(ALL_REDUCE, ALL_TO_ALL, DEEPEP_HIGH_THROUGHPUT, DEEPEP_LOW_LATENCY),
    )
    enable_eplb: bool = execution_option(
        False,
        help="Measure the load of each expert, and move experts between ranks while serving so that the ranks are "
        "equally busy (with all2all_backend all_to_all).",
    )
    num_redundant_experts: int = execution_option(
        0,
        help="Further copies of experts per layer, which enable_eplb gives to the busiest ones.",
        unit="experts",
        check=at_least(0),
    )
    eplb_step_interval: int = execution_option(
        3000, help="Steps between two decisions of enable_eplb.", unit="steps", check=positive
    )
    enable_dp_attention: bool = execution_option(
        False,
        help="Of a model with multi-head latent attention, each rank holds the whole attention and the KV of its own "
        "sequences, instead of the KV of all: as many times the tokens as there are ranks (data-parallel attention).",
    )
    dp_attention_size: int | None = execution_option(
        None,
        help="With enable_dp_attention, groups of ranks that attend each for sequences of its own; the ranks of a "
        "group share the heads of attention. Default: each rank is a group.",
        unit="groups",
        check=at_least(2),
    )
    device: str = execution_option(
        "auto", help="Device of the ranks; auto is cuda if there is a GPU.", check=one_of("auto", *DEVICES)
    )
    cuda_graphs: bool = execution_option(
        True, help="Record decode steps on a GPU as CUDA graphs and replay them."
    )
    batch_invariant: bool | None = execution_option(
        None,
        help="Attention gives the same bits whatever else is in the batch; by default on a CPU. On a GPU it costs "
        "time when few long sequences run, and does not support sparse attention. With latents, prompts are always "
        "expanded to keys and values, which costs time when short prompts follow long cached ones.",
    )
    attention_backend: str = execution_option(
        "triton",
        help="Attention on a GPU: triton is quire's own kernels; flashinfer is FlashInfer; flash_attn is "
        "FlashAttention 3, for prompts; auto is the first of these two that is installed and fits, or else triton. "
        "A named library must be installed and fit (libraries: not yet run on a GPU).",
        check=one_of("auto", "triton", "flashinfer", "flash_attn"),
    )
    linear_backend: str = execution_option(
        "triton",
        help="Linear layers in float8 with a scale per block, on a GPU: triton is quire's own kernels; deep_gemm is "
        "DeepGEMM; auto is deep_gemm if it is installed and fits. Both quantize activations to float8 on Hopper. A "
        "named library must be installed and fit (not yet run on a GPU).",
        check=one_of("auto", "triton", "deep_gemm"),
    )
    moe_backend: str = execution_option(
        "triton",
        help="Experts in float8 with a scale per block, on a GPU: triton is quire's own kernels; deep_gemm is "
        "DeepGEMM's grouped products for steps with many tokens per expert, with activations in float8; auto is "
        "deep_gemm if it is installed and fits. A named library must be installed and fit (not yet run on a GPU).",
        check=one_of("auto", "triton", "deep_gemm"),
    )
    all_reduce_backend: str = execution_option(
        "triton",
        help="Sums over ranks with fused_all_reduce: triton is quire's own kernel; flashinfer is FlashInfer's, on "
        "Hopper and later; auto is flashinfer if it is installed and fits. A named library must be installed and fit "
        "(not yet run on a GPU).",
        check=one_of("auto", "triton", "flashinfer"),
    )
    linear_attention_backend: str = execution_option(
        "triton",
        help="Gated delta nets and Kimi delta attention on a GPU: triton is quire's own kernels; fla is "
        "flash-linear-attention, for prompts; auto is fla if it is installed and fits. A named library must be "
        "installed and fit (not yet run on a GPU).",
        check=one_of("auto", "triton", "fla"),
    )
    logits_processors: str | None = execution_option(
        None,
        help="Custom logits processors that requests may ask for: names of entry points in the group "
        "quire.logits_processors of installed packages, separated by commas.",
        metavar="NAMES",
        check=processor_names,
    )
    fused_all_reduce: bool = execution_option(
        False,
        help="Ranks on GPUs of one host sum few tokens with a kernel of quire instead of NCCL (not yet measured).",
    )
    spare_processes: int = execution_option(
        1,
        help="Idle processes on each node of a replica, of about 180 MiB, which take the place of a rank or a "
        "scheduler that fails; without one, a recovery waits until Python and torch have started.",
        unit="processes",
        check=between(0, MAX_SPARE_PROCESSES),
    )
    standby_weights: bool = execution_option(
        False,
        help="On CPUs, keep a started process for each replica, which takes the place of a rank that fails, and the "
        "weights and KV of all ranks in memory that outlives their processes; for ranks on the scheduler's node.",
    )
    weights_from_peers: bool = execution_option(
        False,
        help="On CPUs, a new replica takes its weights from a running one of the same version: on one host the two "
        "share the memory, between hosts they are copied over an encrypted connection if that is faster than to read "
        "the files.",
    )

    @property
    def keeps_weights(self) -> bool:
        """Return whether a rank has its weights in memory that other processes can map."""
        return self.standby_weights or self.weights_from_peers

    @property
    def num_ranks(self) -> int:
        """Return the ranks of a replica."""
        return self.pipeline_parallel_size * self.tensor_parallel_size


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The paged KV cache."""

    block_size: int = _kv_option(
        16, help="Tokens per KV block.", unit="tokens", check=between(1, MAX_BLOCK_SIZE)
    )
    kv_cache_memory: int | None = _kv_option(
        None,
        help="KV memory per rank, for example 512MiB or 8GiB. Default: the share of --gpu-memory-utilization on a "
        "GPU, 512 MiB on a CPU.",
        unit="bytes",
        check=positive,
        kind=NUM_BYTES,
    )
    gpu_memory_utilization: float = _kv_option(
        0.9,
        help="Share of a GPU's memory for weights, activations and KV cache together.",
        unit="share",
        check=share,
    )
    num_kv_blocks: int | None = _kv_option(
        None,
        help="KV blocks per rank, the scratch block included, instead of an amount of memory. A block holds tokens "
        "of the layers with the same window.",
        unit="blocks",
        check=at_least(2),
    )
    num_host_kv_blocks: int = _kv_option(
        0,
        help="KV blocks per rank in host memory, for evicted prefixes and preempted sequences.",
        unit="blocks",
        check=at_least(0),
    )
    num_state_slots: int | None = _kv_option(
        None,
        help="Slots per rank for the states of models whose layers keep one of each sequence, the scratch slot "
        "included: one for each sequence that runs, the others for snapshots of prefixes. Default: by the memory.",
        unit="slots",
        check=at_least(2),
    )
    num_host_state_slots: int = _kv_option(
        0,
        help="Slots per rank in host memory for snapshots of states that the device has no room for any more, and "
        "for the states of preempted sequences, of models whose layers keep a state of each sequence.",
        unit="slots",
        check=at_least(0),
    )
    encoder_cache_memory: int | None = _kv_option(
        None,
        help="Memory per rank for the embeddings of images, of models that read images, for example 256MiB. An image "
        "that needs more is served all the same. Default: for four times --max-num-batched-tokens.",
        unit="bytes",
        check=positive,
        kind=NUM_BYTES,
    )
    kv_cache_dtype: str = _kv_option(
        "auto",
        help="Type of keys and values in the cache; auto is the type of activations. The others take half of the "
        "memory or less, with results close to full precision. They have a scale per token and head, but "
        "fp8_per_tensor those of the checkpoint (k_scale and v_scale of each layer, or else 1), on a GPU.",
        check=one_of("auto", "fp8_e4m3", "fp8_per_tensor", "int8"),
    )
    prefix_caching: bool = _kv_option(
        True, help="Keep computed KV blocks for later prompts with the same beginning."
    )
    kv_transfer: bool = _kv_option(
        False,
        help="Let a request that moves to another replica take its KV blocks along, where reading them is faster "
        "than computing them.",
    )
    kv_transport: str = _kv_option(
        "auto",
        help="How KV blocks come from another replica, if that has the same: auto is memory on one host, and "
        "encrypted TCP between hosts; nixl is NIXL, over RDMA where UCX finds some. It neither encrypts nor "
        "authenticates: use it on a network that only the cluster reaches (not yet run on a GPU, or over RDMA).",
        check=one_of("auto", NIXL),
    )
    role: str = _kv_option(
        "both",
        help="Part of a request that this server computes: both; prefill, long prompts, which another replica then "
        "continues; decode, everything else. The last two imply --kv-transfer.",
        check=one_of("both", "prefill", "decode"),
    )
    kv_events: str | None = _kv_option(
        None,
        help="Publish the blocks that the prefix cache stores and removes, with their tokens, for routers that read "
        "vLLM's KV events. Not encrypted: bind it where only routers can connect.",
        metavar="zmq://HOST:PORT",
        check=zmq_endpoint,
    )
    kv_events_replay: str | None = _kv_option(
        None,
        help="Where routers ask for KV events that they missed. Default: nowhere.",
        metavar="zmq://HOST:PORT",
        check=zmq_endpoint,
    )
    kv_events_topic: str = _kv_option("", help="Topic of the messages of --kv-events.")
    kv_disk: str | None = _kv_option(
        None,
        help="Keep KV blocks in files of this directory of the host, with a bound of bytes, so that a restarted "
        "server finds the prefixes of the one before. Needs host blocks; without --num-host-kv-blocks it takes twice "
        "as many as the longest sequence has, up to 2,048.",
        metavar="DIR:SIZE",
        kind=DIRECTORY_SIZE,
    )
    kv_shared: str | None = _kv_option(
        None,
        help="As --kv-disk, in a directory that several servers of one user share, on any file system, or in a "
        "bucket of an object store (s3://BUCKET/PREFIX, with boto3). The bound is for all of them together.",
        metavar="DIR:SIZE",
        kind=PLACE_SIZE,
    )
    kv_key: str | None = _kv_option(
        None,
        help="File of 32 random bytes with mode 0600, with which the blocks of --kv-disk and --kv-shared are signed: "
        "the same on all hosts that share a directory. Default: quire/kv.key in XDG_STATE_HOME or ~/.local/state, "
        "made at the first start.",
        metavar="FILE",
        kind=FILE_NAME,
    )

    @property
    def moves_kv(self) -> bool:
        """Return whether KV blocks may come from other replicas and go there."""
        return self.kv_transfer or self.role != "both"


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Limits of a step and of the waiting queue, deadlines, and the order of admission."""

    max_logprobs: int = model_option(
        20,
        help="Most log-probabilities per token that a request may ask for; -1 for no limit. Those of a whole "
        "vocabulary take a megabyte per token.",
        unit="tokens",
        check=at_least(-1),
    )
    step_timeout_s: float = execution_option(
        10.0,
        help="A rank without a result this long after the expected end of a step counts as hung; sooner in short "
        "steps, or if its process does not answer.",
        unit="seconds",
        check=positive_finite,
    )
    audit: bool = execution_option(
        False, help="Recount all KV blocks after each step, to find errors in the accounting."
    )
    record_steps: str | None = execution_option(
        None,
        help="Directory in which each replica records the work and time of its steps, without texts, for "
        "`quire calibrate --steps`. Not with drafts or pipeline stages.",
        metavar="DIR",
    )
    max_num_seqs: int | None = _scheduling_option(
        None,
        help="Sequences that run at once. Default: 64; on GPUs 256 from 40 GiB of memory on, 1,024 from 70 GiB on.",
        unit="sequences",
        check=positive_up_to(MAX_NUM_SEQS),
    )
    max_num_batched_tokens: int | None = _scheduling_option(
        None,
        help="Tokens per step, prompts and outputs together. Default: 2,048; on GPUs 8,192 from 40 GiB of memory on.",
        unit="tokens",
        check=positive_up_to(MAX_NUM_BATCHED_TOKENS),
    )
    max_queue_len: int = _scheduling_option(
        4096,
        help="Waiting requests; with this many, new ones are refused with RESOURCE_EXHAUSTED.",
        unit="requests",
        check=positive,
    )
    max_steps_in_flight: int | None = _scheduling_option(
        None,
        help="Steps that are planned before the result of the first has arrived; 2 hides the scheduler's time. "
        "Default: 2, and 1 for LLM on one CPU rank, which shares a thread with the scheduler.",
        unit="steps",
        check=between(1, MAX_STEPS_IN_FLIGHT),
    )
    policy: str | None = _scheduling_option(
        None,
        help="Order of admission. Default: fair: tenants, and adapters of one tenant, share the rows.",
        check=one_of("fcfs", "priority", "shortest-prefill", "fair", "longest-prefix"),
    )
    tenant_weights: tuple[tuple[str, float], ...] = _scheduling_option(
        (),
        help="A tenant's share under the policy fair; other tenants have 1. May be repeated.",
        check=positive_amounts,
        kind=amounts("tenant weight", "gold=3"),
        flag="--tenant-weight",
        metavar="NAME=SHARE",
    )


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Conversations: their template, and the formats of the model's output, whose names EngineOptions checks.

    In an EngineConfig the template is its text.
    """

    chat_template: str | None = _chat_option(
        None,
        help="File of a chat template to use instead of the model's own, or the template itself.",
        metavar="FILE",
    )
    trust_request_chat_template: bool = _chat_option(
        False, help="Allow requests to bring chat templates of their own."
    )
    tool_call_parser: str = _chat_option(
        "auto", help="Format of the model's tool calls; auto is the one that its chat template shows."
    )
    reasoning_parser: str = _chat_option(
        "auto", help="Format of the model's reasoning; auto is the one that its chat template shows."
    )


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsOptions:
    """Structured outputs. The last two hold for all requests, see StructuredOutputsParams."""

    structured_outputs_backend: str = _constraint_option(
        "auto",
        help="Library that constrains outputs to grammars; auto is the first of them that supports the constraint.",
        check=one_of("auto", *GRAMMAR_BACKENDS),
    )
    disable_any_whitespace: bool = _constraint_option(
        False, help="Structured JSON has no white space between its parts."
    )
    disable_additional_properties: bool = _constraint_option(
        False, help="Structured JSON objects have no properties beside those that their schema lists."
    )


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """LoRA adapters."""

    enable_lora: bool = _lora_option(False, help="Serve LoRA adapters of the model, see --lora-modules.")
    lora_modules: tuple[tuple[str, str], ...] = _lora_option(
        (),
        help="An adapter in PEFT's layout: the name that clients use for it, and its directory on every node. May be "
        "repeated.",
        check=check_lora_modules,
        kind=LORA_MODULES,
        metavar="NAME=PATH",
    )
    max_loras: int = _lora_option(
        1,
        help="Adapters that a step may use; each has a slot in the memory of the device.",
        unit="adapters",
        check=between(1, MAX_LORAS),
    )
    max_lora_rank: int = _lora_option(
        16, help="Largest rank of an adapter.", unit="dimensions", check=between(1, MAX_LORA_RANK)
    )
    lora_target_modules: str | None = _lora_option(
        None,
        help="Modules that adapters may change, which alone have memory in each slot: names or parts of paths, "
        "separated by commas, for example q_proj,v_proj or self_attn. Default: all that can be adapted.",
        metavar="NAMES",
        check=check_target_modules,
    )
    max_cpu_loras: int | None = _lora_option(
        None,
        help="Adapters in host memory, the least recently used of which make room for others. Default: the larger of "
        "--max-loras and the number of --lora-modules.",
        unit="adapters",
        check=positive,
    )


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Images in prompts: how many, where they come from, and how they are processed."""

    limit_mm_per_prompt: str | None = _image_option(
        None,
        help="Most images and videos of a prompt, and frames of a video, as a JSON object, for example "
        '{"image": 4, "video": {"count": 1, "num_frames": 64}}. Default: 999 of each, of 128 frames. Audio is '
        "refused anyway.",
        check=image_limits,
        kind=JSON_OBJECT,
        metavar="JSON",
    )
    mm_processor_kwargs: str | None = _image_option(
        None,
        help="Settings of the model's image processor that replace its own, as a JSON object, for example "
        '{"max_pixels": 1003520}.',
        check=json_object,
        kind=JSON_OBJECT,
        metavar="JSON",
    )
    allowed_media_domains: str | None = _image_option(
        None,
        help="Hosts from which images of URLs are fetched, separated by commas; http://HOST allows a host without "
        "TLS. Addresses that are not public are refused, unless http://HOST:PORT names the port. None by default.",
        check=media_domains,
        kind=NAMES,
        metavar="HOSTS",
    )

    mm_encoder_tp_mode: str = _image_option(
        "weights",
        help="How the ranks encode an image: weights shares each layer of the encoder between them, as far as its "
        "heads can be divided; data has each rank hold it whole and encode every image.",
        check=one_of("weights", "data"),
    )

    def max_count(self, kind: str) -> int:
        """Return the most images, or the most videos, of a prompt."""
        return self._limit(kind, "count", MAX_IMAGES)

    @property
    def max_frames(self) -> int:
        """Most frames of a video."""
        return self._limit("video", "num_frames", DEFAULT_FRAMES)

    def _limit(self, kind: str, name: str, default: int) -> int:
        limit = json.loads(self.limit_mm_per_prompt or "{}").get(kind, {})
        limit = limit if isinstance(limit, dict) else {"count": limit}
        return int(limit.get(name, default))

    @property
    def processor_settings(self) -> dict[str, Any]:
        """Settings of the image processor that replace the model's own."""
        return dict(json.loads(self.mm_processor_kwargs or "{}"))

    @property
    def media_domains(self) -> tuple[str, ...]:
        """Entries of allowed_media_domains."""
        return tuple(self.allowed_media_domains.split(",")) if self.allowed_media_domains else ()
