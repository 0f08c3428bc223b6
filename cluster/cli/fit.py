"""`quire fit`."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from ...proto.config import ModelConfig
    from ..config.capacity import Capacity

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_QUANTIZED_KV = ("int8", "fp8_e4m3")
# Length of the sequences that the table counts, beside the model's own context.
_TYPICAL_LEN = 4096


def fit(
    model: Annotated[
        str,
        typer.Argument(
            help="ORG/NAME on the Hugging Face Hub, or a model directory; its weights are not needed."
        ),
    ],
    gpu: Annotated[
        str, typer.Option(help="The GPU: its name, for example h200, or its memory, for example 80GB.")
    ] = "h100",
    gpus: Annotated[int, typer.Option(help="GPUs at hand.", min=1)] = 8,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    quantization: Annotated[
        str | None, typer.Option(help="Quantize weights while they are loaded: int8 or fp8.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, int8 or fp8_e4m3.")] = "auto",
    enable_expert_parallel: Annotated[
        bool, typer.Option(help="Of a mixture of experts, each GPU holds some experts whole.")
    ] = False,
    enable_dp_attention: Annotated[
        bool,
        typer.Option(help="Of a model with latent attention, each GPU holds the KV of its own sequences."),
    ] = False,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.", min=1)] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens per step.", min=1)] = 8192,
    max_loras: Annotated[int, typer.Option(help="Slots for LoRA adapters; 0 for none.", min=0)] = 0,
    max_lora_rank: Annotated[int, typer.Option(help="Largest rank of an adapter.", min=1)] = 16,
    lora_target_modules: Annotated[
        str | None,
        typer.Option(help="Modules that adapters may change, separated by commas. Default: all."),
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of a GPU's memory that quire may use.", min=0.1, max=1.0)
    ] = 0.9,
) -> None:
    """Show which tensor-parallel sizes a model fits, and how many tokens its KV cache then holds.

    An estimate from config.json alone: no weights are downloaded, and no GPU is used.

    Example: `quire fit Qwen/Qwen3-8B --gpu h200 --gpus 8`
    """
    from rich.console import Console

    from ...proto.errors import ConfigError
    from ...worker.lora.target_modules import TargetModules
    from ...worker.models.registry import check_dp_attention
    from ...worker.models.slot_size import measure_slot
    from ...worker.models.weight_size import make_meta_model, measure_weights
    from ..config.capacity import GIB, Workload, capacity
    from ..config.engine_options import EngineOptions
    from ..config.gpu_types import gpu_bytes
    from ..config.model_source import describe_files

    memory = gpu_bytes(gpu)
    options = EngineOptions(
        model, revision=revision, quantization=quantization, kv_cache_dtype=kv_cache_dtype
    )
    described = describe_files(options)
    dtype_bytes = _DTYPE_BYTES.get(described.dtype, 2)
    module = make_meta_model(described)
    weights = measure_weights(described, module, dtype_bytes)
    targets = TargetModules(tuple(lora_target_modules.split(",")) if lora_target_modules else ())
    slot = measure_slot(module, int(described.hf.get("hidden_size") or 0), max_lora_rank, targets)
    kv_bytes = 1 if kv_cache_dtype in _QUANTIZED_KV else dtype_bytes
    workload = Workload(max_num_seqs, max_num_batched_tokens, gpu_memory_utilization, dtype_bytes, kv_bytes)
    num_experts = _num_experts(described) if enable_expert_parallel else 0
    if enable_dp_attention:
        if max_loras:
            raise ConfigError("enable_dp_attention does not support LoRA adapters yet; leave max_loras out")
        check_dp_attention(described)
    found = []
    for size in _parallel_sizes(described, gpus, enable_expert_parallel):
        rank_bytes = weights.rank_bytes(size, num_experts, has_whole_attention=enable_dp_attention)
        num_partitions = size if enable_dp_attention else 1
        lora_bytes = max_loras * slot.rank_bytes(dtype_bytes, size, num_experts)
        found.append(capacity(described, rank_bytes, memory, size, workload, num_partitions, lora_bytes))
    console = Console()
    console.print(
        f"{described.name}: {described.architecture}, {weights.num_parameters / 1e9:.2f} B parameters, "
        f"{weights.num_bytes / GIB:.1f} GiB of weights, context of {described.max_model_len:,} tokens"
    )
    console.print(_table(found, described.max_model_len, f"{gpus} x {gpu}", has_slots=max_loras > 0))
    if not any(each.num_kv_tokens for each in found):
        raise ConfigError(f"{described.name} does not fit on {gpus} x {gpu}")


def _num_experts(model: "ModelConfig") -> int:
    """Return the experts of a layer. Raises ConfigError if the ranks cannot hold whole experts of the model."""
    from ...worker.models.registry import check_expert_parallel, check_supported

    return check_expert_parallel(model, check_supported(model, 1)).count


def _parallel_sizes(model: "ModelConfig", num_gpus: int, expert_parallel: bool) -> list[int]:
    """Return the tensor-parallel sizes that the model allows, up to the number of GPUs."""
    from ...proto.errors import ConfigError
    from ...worker.models.registry import check_supported

    allowed = []
    check_supported(model, 1)
    for size in range(1, num_gpus + 1):
        try:
            check_supported(model, size, expert_parallel=expert_parallel)
        except ConfigError:
            continue
        allowed.append(size)
    return allowed


def _table(found: "Sequence[Capacity]", context_len: int, title: str, *, has_slots: bool) -> "Table":
    from rich.table import Table

    from ..config.capacity import GIB

    lengths = sorted({min(_TYPICAL_LEN, context_len), context_len})
    table = Table(title=title, title_justify="left")
    slots = ["LoRA slots per GPU"] if has_slots else []
    for name in ("tensor parallel", "weights per GPU", *slots, "KV per token and GPU", "KV tokens"):
        table.add_column(name, justify="right")
    for length in lengths:
        table.add_column(f"sequences of {length:,}", justify="right")
    for each in found:
        fits = each.num_kv_tokens > 0
        table.add_row(
            str(each.tensor_parallel_size),
            f"{each.weight_bytes / GIB:.1f} GiB",
            *([f"{each.lora_bytes / GIB:.2f} GiB"] if has_slots else []),
            f"{each.kv_token_bytes / 1024:.1f} KiB",
            f"{each.num_kv_tokens:,}" if fits else "does not fit",
            *(f"{each.concurrency(length):,.1f}" if fits else "" for length in lengths),
        )
    return table
