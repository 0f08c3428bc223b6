"""EngineOptions: the options of one replica's engine."""

from dataclasses import dataclass
from pathlib import Path

from ..text.chat_format.registry import AUTO, NONE, REASONING_FORMATS, TOOL_CALL_FORMATS
from .checks import (
    at_least,
    between,
    one_of,
    positive,
    positive_amounts,
    positive_finite,
    positive_up_to,
    processor_names,
    share,
)
from .hub import is_model_id
from .lora_options import LORA_MODULES, MAX_LORA_RANK, MAX_LORAS, check_lora_modules, check_target_modules
from .option import option, validate_options
from .speculative_options import JSON_OBJECT, check_speculative_config
from .value_kinds import NUM_BYTES, amounts

DEMO_MODEL = "demo"
DEMO_MODEL_PATH = Path(__file__).parents[1] / "cli" / "demo" / "model"
# The EAGLE-3 head of the demo model and a smaller model that drafts for it, for `speculative_config`.
DEMO_HEAD, DEMO_DRAFT = "demo-eagle3", "demo-draft"
DEMO_HEAD_PATH = DEMO_MODEL_PATH.parent / "draft_head"
DEMO_DRAFT_PATH = DEMO_MODEL_PATH.parent / "draft_model"
_BUNDLED = {DEMO_MODEL: DEMO_MODEL_PATH, DEMO_HEAD: DEMO_HEAD_PATH, DEMO_DRAFT: DEMO_DRAFT_PATH}

DEVICES = ("cpu", "cuda")
RUNNERS = ("auto", "generate", "pooling", "both")
DTYPES = ("float32", "bfloat16", "float16")
GRAMMAR_BACKENDS = ("xgrammar", "guidance")
MAX_BLOCK_SIZE = 1024
# Far above what serves well; more would only fail later, when every rank allocates its rows and buffers.
MAX_NUM_SEQS = 1 << 14
MAX_NUM_BATCHED_TOKENS = 1 << 20
MAX_STEPS_IN_FLIGHT = 8
MAX_SPARE_PROCESSES = 64

_MODEL, _EXECUTION, _KV_CACHE, _SCHEDULING, _CHAT = "Model", "Execution", "KV cache", "Scheduling", "Chat"
_STRUCTURED_OUTPUTS, _LORA = "Structured outputs", "LoRA adapters"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """An operator's choices for a replica's engine. `resolve` combines them with a machine and the model's files.

    Args:
        model: a Hugging Face model directory, ORG/NAME on the Hugging Face Hub, or ``demo`` for the bundled model.

    Raises:
        ConfigError: a value has the wrong type or is out of its range.
    """

    model: str

    served_model_name: str | None = option(
        None,
        help="Name that clients use for the model. Default: ORG/NAME, or the name of its directory.",
        group=_MODEL,
    )
    revision: str | None = option(
        None,
        help="Branch, tag or commit of a model on the Hugging Face Hub. Default: its main branch.",
        group=_MODEL,
    )
    runner: str = option(
        "auto",
        help="Use of the model: generate text, pooling (embeddings, scores), or both; auto is pooling for "
        "checkpoints of sentence-transformers and those with a classification head.",
        check=one_of(*RUNNERS),
        group=_MODEL,
    )
    dtype: str = option(
        "auto",
        help="Type of activations and of weights that are not quantized; auto is float32 on a CPU and the "
        "checkpoint's type on a GPU.",
        check=one_of("auto", *DTYPES),
        group=_MODEL,
    )
    quantization: str | None = option(
        None,
        help="Quantize full-precision weights while they are loaded. Quantized checkpoints need no option.",
        check=one_of("int8", "fp8"),
        group=_MODEL,
    )
    max_model_len: int | None = option(
        None,
        help="Longest sequence, prompt and output together. Default: the model's context length.",
        unit="tokens",
        check=at_least(2),
        group=_MODEL,
    )
    seed: int = option(
        0,
        help="Base seed; requests without a seed of their own draw theirs from it.",
        group=_MODEL,
    )
    max_logprobs: int = option(
        20,
        help="Most log-probabilities per token that a request may ask for; -1 for no limit. Those of a whole "
        "vocabulary take a megabyte per token.",
        unit="tokens",
        check=at_least(-1),
        group=_MODEL,
    )

    tensor_parallel_size: int = option(
        1,
        help="Ranks that share each layer.",
        unit="ranks",
        check=at_least(1),
        group=_EXECUTION,
    )
    enable_expert_parallel: bool = option(
        False,
        help="Of a mixture of experts, each rank holds some experts whole, instead of a part of each.",
        group=_EXECUTION,
    )
    enable_dp_attention: bool = option(
        False,
        help="Of a model with multi-head latent attention, each rank holds the whole attention and the KV of its own "
        "sequences, instead of the KV of all: as many times the tokens as there are ranks (data-parallel attention).",
        group=_EXECUTION,
    )
    device: str = option(
        "auto",
        help="Device of the ranks; auto is cuda if there is a GPU.",
        check=one_of("auto", *DEVICES),
        group=_EXECUTION,
    )
    cuda_graphs: bool = option(
        True,
        help="Record decode steps on a GPU as CUDA graphs and replay them.",
        group=_EXECUTION,
    )
    batch_invariant: bool = option(
        False,
        help="Attention on a GPU gives the same bits whatever else is in the batch, at some cost when few long "
        "sequences run. With latents, prompts are always expanded to keys and values; not for sparse attention.",
        group=_EXECUTION,
    )
    attention_backend: str = option(
        "triton",
        help="Attention of prompts on a GPU: triton is quire's own kernel, flash_attn is FlashAttention 3, which "
        "must be installed (not yet run).",
        check=one_of("triton", "flash_attn"),
        group=_EXECUTION,
    )
    logits_processors: str | None = option(
        None,
        help="Custom logits processors that requests may ask for: names of entry points in the group "
        "quire.logits_processors of installed packages, separated by commas.",
        metavar="NAMES",
        check=processor_names,
        group=_EXECUTION,
    )
    fused_all_reduce: bool = option(
        False,
        help="Ranks on GPUs of one host sum few tokens with a kernel of quire instead of NCCL (not yet measured).",
        group=_EXECUTION,
    )
    step_timeout_s: float = option(
        10.0,
        help="A rank without a result this long after the expected end of a step counts as hung; sooner in short "
        "steps, or if its process does not answer.",
        unit="seconds",
        check=positive_finite,
        group=_EXECUTION,
    )
    spare_processes: int = option(
        1,
        help="Idle processes on each node of a replica, of about 180 MiB, which take the place of a rank or a "
        "scheduler that fails; without one, a recovery waits until Python and torch have started.",
        unit="processes",
        check=between(0, MAX_SPARE_PROCESSES),
        group=_EXECUTION,
    )
    standby_weights: bool = option(
        False,
        help="On CPUs, keep a started process for each replica, which takes the place of a rank that fails, and the "
        "weights and KV of all ranks in memory that outlives their processes; for ranks on the scheduler's node.",
        group=_EXECUTION,
    )
    speculative_config: str | None = option(
        None,
        help="Speculative decoding: a JSON object with method, num_speculative_tokens and settings of the method.",
        check=check_speculative_config,
        kind=JSON_OBJECT,
        metavar="JSON",
        group=_EXECUTION,
    )
    audit: bool = option(
        False,
        help="Recount all KV blocks after each step, to find errors in the accounting.",
        group=_EXECUTION,
    )

    block_size: int = option(
        16,
        help="Tokens per KV block.",
        unit="tokens",
        check=between(1, MAX_BLOCK_SIZE),
        group=_KV_CACHE,
    )
    kv_cache_memory: int | None = option(
        None,
        help="KV memory per rank, for example 512MiB or 8GiB. Default: the share of --gpu-memory-utilization on a "
        "GPU, 512 MiB on a CPU.",
        unit="bytes",
        check=positive,
        kind=NUM_BYTES,
        group=_KV_CACHE,
    )
    gpu_memory_utilization: float = option(
        0.9,
        help="Share of a GPU's memory for weights, activations and KV cache together.",
        unit="share",
        check=share,
        group=_KV_CACHE,
    )
    num_kv_blocks: int | None = option(
        None,
        help="KV blocks per rank, the scratch block included, instead of an amount of memory. A block holds tokens "
        "of the layers with the same window.",
        unit="blocks",
        check=at_least(2),
        group=_KV_CACHE,
    )
    num_host_kv_blocks: int = option(
        0,
        help="KV blocks per rank in host memory, for evicted prefixes and preempted sequences.",
        unit="blocks",
        check=at_least(0),
        group=_KV_CACHE,
    )
    kv_cache_dtype: str = option(
        "auto",
        help="Type of keys and values in the cache; auto is the type of activations. The others take half of the "
        "memory or less, with results close to full precision.",
        check=one_of("auto", "fp8_e4m3", "int8"),
        group=_KV_CACHE,
    )
    prefix_caching: bool = option(
        True,
        help="Keep computed KV blocks for later prompts with the same beginning.",
        group=_KV_CACHE,
    )

    max_num_seqs: int | None = option(
        None,
        help="Sequences that run at once. Default: 64; on GPUs 256 from 40 GiB of memory on, 1,024 from 70 GiB on.",
        unit="sequences",
        check=positive_up_to(MAX_NUM_SEQS),
        group=_SCHEDULING,
    )
    max_num_batched_tokens: int | None = option(
        None,
        help="Tokens per step, prompts and outputs together. Default: 2,048; on GPUs 8,192 from 40 GiB of memory on.",
        unit="tokens",
        check=positive_up_to(MAX_NUM_BATCHED_TOKENS),
        group=_SCHEDULING,
    )
    max_queue_len: int = option(
        4096,
        help="Waiting requests; with this many, new ones are refused with RESOURCE_EXHAUSTED.",
        unit="requests",
        check=positive,
        group=_SCHEDULING,
    )
    max_steps_in_flight: int | None = option(
        None,
        help="Steps that are planned before the result of the first has arrived; 2 hides the scheduler's time. "
        "Default: 2, and 1 for LLM on one CPU rank, which shares a thread with the scheduler.",
        unit="steps",
        check=between(1, MAX_STEPS_IN_FLIGHT),
        group=_SCHEDULING,
    )
    policy: str | None = option(
        None,
        help="Order of admission. Default: fcfs, and fair with --enable-lora: adapters share the rows.",
        check=one_of("fcfs", "priority", "shortest-prefill", "fair", "longest-prefix"),
        group=_SCHEDULING,
    )
    tenant_weights: tuple[tuple[str, float], ...] = option(
        (),
        help="A tenant's share under the policy fair; other tenants have 1. May be repeated.",
        check=positive_amounts,
        kind=amounts("tenant weight", "gold=3"),
        flag="--tenant-weight",
        metavar="NAME=SHARE",
        group=_SCHEDULING,
    )

    chat_template: str | None = option(
        None,
        help="File of a chat template to use instead of the model's own, or the template itself.",
        metavar="FILE",
        group=_CHAT,
    )
    trust_request_chat_template: bool = option(
        False,
        help="Allow requests to bring chat templates of their own.",
        group=_CHAT,
    )
    tool_call_parser: str = option(
        AUTO,
        help="Format of the model's tool calls; auto is the one that its chat template shows.",
        check=one_of(AUTO, NONE, *sorted(TOOL_CALL_FORMATS)),
        group=_CHAT,
    )
    reasoning_parser: str = option(
        AUTO,
        help="Format of the model's reasoning; auto is the one that its chat template shows.",
        check=one_of(AUTO, NONE, *sorted(REASONING_FORMATS)),
        group=_CHAT,
    )

    structured_outputs_backend: str = option(
        AUTO,
        help="Library that constrains outputs to grammars; auto is the first of them that supports the constraint.",
        check=one_of(AUTO, *GRAMMAR_BACKENDS),
        group=_STRUCTURED_OUTPUTS,
    )
    disable_any_whitespace: bool = option(
        False,
        help="Structured JSON has no white space between its parts.",
        group=_STRUCTURED_OUTPUTS,
    )
    disable_additional_properties: bool = option(
        False,
        help="Structured JSON objects have no properties beside those that their schema lists.",
        group=_STRUCTURED_OUTPUTS,
    )

    enable_lora: bool = option(
        False,
        help="Serve LoRA adapters of the model, see --lora-modules.",
        group=_LORA,
    )
    lora_modules: tuple[tuple[str, str], ...] = option(
        (),
        help="An adapter in PEFT's layout: the name that clients use for it, and its directory on every node. May be "
        "repeated.",
        check=check_lora_modules,
        kind=LORA_MODULES,
        metavar="NAME=PATH",
        group=_LORA,
    )
    max_loras: int = option(
        1,
        help="Adapters that a step may use; each has a slot in the memory of the device.",
        unit="adapters",
        check=between(1, MAX_LORAS),
        group=_LORA,
    )
    max_lora_rank: int = option(
        16,
        help="Largest rank of an adapter.",
        unit="dimensions",
        check=between(1, MAX_LORA_RANK),
        group=_LORA,
    )
    lora_target_modules: str | None = option(
        None,
        help="Modules that adapters may change, which alone have memory in each slot: names or parts of paths, "
        "separated by commas, for example q_proj,v_proj or self_attn. Default: all that can be adapted.",
        metavar="NAMES",
        check=check_target_modules,
        group=_LORA,
    )
    max_cpu_loras: int | None = option(
        None,
        help="Adapters in host memory, the least recently used of which make room for others. Default: the larger of "
        "--max-loras and the number of --lora-modules.",
        unit="adapters",
        check=positive,
        group=_LORA,
    )

    def __post_init__(self) -> None:
        validate_options(self)

    @property
    def name(self) -> str:
        """The name that clients use for the model."""
        if self.served_model_name or self.model in _BUNDLED:
            return self.served_model_name or self.model
        return self.hub_id or self.model_path.resolve().name

    @property
    def model_path(self) -> Path:
        """The model's directory, unless `hub_id` is set."""
        return _BUNDLED.get(self.model) or Path(self.model).expanduser()

    @property
    def hub_id(self) -> str:
        """ORG/NAME if the model is one on the hub; empty if it is a directory."""
        return self.model if is_model_id(self.model) and not self.model_path.exists() else ""
