"""`quire fit`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from ...proto.config import ModelConfig
    from ...worker import WeightSize
    from ..config.capacity import Capacity, Workload
    from .splits import Split

# Length of the sequences that the table counts, beside the model's own context.
_TYPICAL_LEN = 4096


_Model = Annotated[
    str,
    typer.Argument(
        help="ORG/NAME on the Hugging Face Hub, or a model directory; its weights are not needed."
    ),
]
_Gpu = Annotated[
    str, typer.Option(help="The GPU: its name, for example h200, or its memory, for example 80GB.")
]
_Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
_Quantization = Annotated[
    str | None, typer.Option(help="Quantize weights while they are loaded: int8 or fp8.")
]
_ExpertParallel = Annotated[
    bool, typer.Option(help="Of a mixture of experts, each GPU holds some experts whole.")
]
_DpAttention = Annotated[
    bool,
    typer.Option(help="Of a model with latent attention, each GPU holds the KV of its own sequences."),
]
_DpSize = Annotated[
    int | None,
    typer.Option(
        help="Groups of GPUs that hold the KV of their own sequences each. Default: each GPU.", min=2
    ),
]
_AllToAll = Annotated[
    str,
    typer.Option(
        help="Other than all_reduce: tokens travel to their experts, and each GPU holds shared ones."
    ),
]
_LoraModules = Annotated[
    str | None,
    typer.Option(help="Modules that adapters may change, separated by commas. Default: all."),
]
_Nodes = Annotated[
    int | None,
    typer.Option(help="Show the splits over so many nodes of --gpus GPUs each.", min=1),
]
_EncoderMode = Annotated[
    str,
    typer.Option(help="weights: the GPUs share the layers of an encoder of images; data: each has it whole."),
]
_TextOnly = Annotated[bool, typer.Option(help="Without the encoder of images.")]
_Utilization = Annotated[
    float, typer.Option(help="Share of a GPU's memory that quire may use.", min=0.1, max=1.0)
]


def fit(
    model: _Model,
    gpu: _Gpu = "h100",
    gpus: Annotated[int, typer.Option(help="GPUs at hand.", min=1)] = 8,
    revision: _Revision = None,
    quantization: _Quantization = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, int8 or fp8_e4m3.")] = "auto",
    mamba_ssm_cache_dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    nodes: _Nodes = None,
    enable_expert_parallel: _ExpertParallel = False,
    enable_dp_attention: _DpAttention = False,
    dp_attention_size: _DpSize = None,
    all2all_backend: _AllToAll = "all_reduce",
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.", min=1)] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens per step.", min=1)] = 8192,
    max_loras: Annotated[int, typer.Option(help="Slots for LoRA adapters; 0 for none.", min=0)] = 0,
    max_lora_rank: Annotated[int, typer.Option(help="Largest rank of an adapter.", min=1)] = 16,
    lora_target_modules: _LoraModules = None,
    mm_encoder_tp_mode: _EncoderMode = "weights",
    language_model_only: _TextOnly = False,
    gpu_memory_utilization: _Utilization = 0.9,
) -> None:
    """Show which tensor-parallel sizes a model fits, and how many tokens its KV cache then holds.

    An estimate from config.json alone: no weights are downloaded, and no GPU is used.

    With --nodes it shows the splits into pipeline stages, tensor-parallel ranks and whole experts instead.

    Example: `quire fit Qwen/Qwen3-8B --gpu h200 --gpus 8`
    """
    from rich.console import Console

    from ...proto.errors import ConfigError, ModelLoadError
    from ...proto.kv_layout import QUANTIZED_KV
    from ...proto.options.sections import DTYPES
    from ..config.capacity import Workload
    from ..config.engine_options import EngineOptions
    from ..config.machine import gpu_bytes
    from ..config.model_checks import check_tokenizer_files
    from ..config.model_source import describe_files

    memory = gpu_bytes(gpu)
    described = describe_files(
        EngineOptions(
            model,
            revision=revision,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            mamba_ssm_cache_dtype=mamba_ssm_cache_dtype,
            mm_encoder_tp_mode=mm_encoder_tp_mode,
            language_model_only=language_model_only,
        )
    )
    dtype_bytes = DTYPES.get(described.dtype, 2)
    kv_bytes = 1 if kv_cache_dtype in QUANTIZED_KV else dtype_bytes
    workload = Workload(
        max_num_seqs,
        max_num_batched_tokens,
        gpu_memory_utilization,
        dtype_bytes,
        kv_bytes,
        shares_encoder=mm_encoder_tp_mode == "weights",
    )
    slots = _Slots(max_loras, max_lora_rank, lora_target_modules)
    if nodes is not None:
        _show_splits(described, nodes, gpus, gpu, memory, workload)
        return
    weights, found = _capacities(
        described,
        gpus,
        memory,
        workload,
        slots,
        enable_expert_parallel,
        enable_dp_attention,
        dp_attention_size,
        all2all_backend,
    )
    console = Console()
    console.print(
        f"{described.name}: {described.architecture}, {_count(weights.num_parameters)} parameters, "
        f"{_size(weights.num_bytes)} of weights, context of {described.max_model_len:,} tokens"
        f"{_encoder(described)}",
        soft_wrap=True,
    )
    try:
        check_tokenizer_files(Path(described.path))
    except ModelLoadError as error:
        console.print(f"`quire serve` will refuse the model: {error}", soft_wrap=True)
    console.print(_table(found, described.max_model_len, f"{gpus} x {gpu}", has_slots=max_loras > 0))
    if not any(each.num_kv_tokens for each in found):
        raise ConfigError(f"{described.name} does not fit on {gpus} x {gpu}")


def _show_splits(
    model: "ModelConfig", num_nodes: int, num_gpus: int, gpu: str, gpu_bytes: int, workload: "Workload"
) -> None:
    """Show the splits of a model over nodes, and the one to take. Raises ConfigError if none fits."""
    from rich.console import Console

    from ...proto.errors import ConfigError
    from ...worker import make_meta_model, measure_weights
    from ..simulation.step_time import find_device
    from .splits import Nodes, best_split, find_splits

    weights = measure_weights(model, make_meta_model(model), workload.dtype_bytes)
    length = min(_TYPICAL_LEN, model.max_model_len)
    splits = find_splits(
        model, weights, Nodes(num_nodes, num_gpus), find_device(gpu), gpu_bytes, workload, length
    )
    console, title = Console(), f"{num_nodes} x {num_gpus} x {gpu}, sequences of {length:,} tokens"
    console.print(
        f"{model.name}: {_count(weights.num_parameters)} parameters, {_size(weights.num_bytes)} of weights",
        soft_wrap=True,
    )
    console.print(_split_table(splits, title))
    best = best_split(splits)
    if best is None:
        raise ConfigError(f"{model.name} does not fit on {num_nodes} x {num_gpus} x {gpu}; add nodes")
    flags = [f"--tensor-parallel-size {best.tensor}"] if best.tensor > 1 else []
    flags += [f"--pipeline-parallel-size {best.pipeline}"] if best.pipeline > 1 else []
    flags += ["--enable-expert-parallel"] if best.whole_experts else []
    if best.attention_groups > 1:
        flags += ["--all2all-backend all_to_all --enable-dp-attention"]
        flags += (
            [f"--dp-attention-size {best.attention_groups}"] if best.attention_groups < best.tensor else []
        )
    console.print(
        f"The fewest GPUs: {' '.join(flags) or 'one GPU'}. Step times are assumed, not measured.",
        soft_wrap=True,
    )


def _split_table(splits: "Sequence[Split]", title: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for name in ("stages", "tensor\nparallel", "experts", "attention", "weights\nper GPU", "KV tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("sequences", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in splits:
        table.add_row(
            str(each.pipeline),
            f"{each.tensor}{' over nodes' if each.spans_nodes else ''}",
            "whole" if each.whole_experts else "",
            f"{each.attention_groups} groups" if each.attention_groups > 1 else "",
            _size(each.capacity.weight_bytes),
            f"{each.capacity.num_kv_tokens:,}" if each.fits else "no room",
            f"{each.num_sequences:,}" if each.fits else "",
            f"{1e3 * each.step_s:.1f} ms" if each.fits else "",
        )
    return table


@dataclass(frozen=True, slots=True)
class _Slots:
    """Slots for LoRA adapters.

    Attributes:
        target_modules: layers that adapters may change, separated by commas; None for all.
    """

    count: int
    max_rank: int
    target_modules: str | None


def _capacities(
    model: "ModelConfig",
    num_gpus: int,
    gpu_bytes: int,
    workload: "Workload",
    slots: _Slots,
    expert_parallel: bool,
    dp_attention: bool,
    dp_attention_size: int | None,
    all2all_backend: str,
) -> "tuple[WeightSize, list[Capacity]]":
    """Return the size of the weights, and the capacity with each tensor-parallel size that the model allows.

    Raises:
        ConfigError: the model does not allow an option.
        ModelLoadError: its configuration is malformed.
    """
    from ...proto.errors import ConfigError
    from ...proto.model.registry import check_dp_attention
    from ...proto.model.target_modules import TargetModules
    from ...proto.options.sections import ALL_REDUCE
    from ...worker import make_meta_model, measure_slot, measure_weights
    from ..config.capacity import capacity

    sends_tokens = all2all_backend != ALL_REDUCE
    if sends_tokens and not expert_parallel:
        raise ConfigError(
            f"all2all_backend {all2all_backend} is for whole experts; set enable_expert_parallel"
        )
    sizes = _parallel_sizes(model, num_gpus, expert_parallel)
    num_experts = _num_experts(model) if expert_parallel else 0
    if dp_attention:
        check_dp_attention(model)
        sizes = [size for size in sizes if size % (dp_attention_size or 1) == 0]
    elif dp_attention_size is not None:
        raise ConfigError(f"dp_attention_size is {dp_attention_size}, but enable_dp_attention is not set")
    module = make_meta_model(model)
    weights = measure_weights(model, module, workload.dtype_bytes)
    targets = TargetModules(tuple(slots.target_modules.split(",")) if slots.target_modules else ())
    slot = measure_slot(module, int(model.hf.get("hidden_size") or 0), slots.max_rank, targets)
    found = []
    for size in sizes:
        num_partitions = (dp_attention_size or size) if dp_attention else 1
        attention_ranks = size // num_partitions if dp_attention else None
        rank_bytes = weights.rank_bytes(
            size, num_experts, attention_ranks=attention_ranks, sends_tokens=sends_tokens and size > 1
        )
        lora_bytes = slots.count * slot.rank_bytes(
            workload.dtype_bytes,
            size,
            num_experts,
            attention_ranks=attention_ranks,
            sends_tokens=sends_tokens and size > 1,
        )
        found.append(capacity(model, rank_bytes, gpu_bytes, size, workload, num_partitions, lora_bytes))
    return weights, found


def _num_experts(model: "ModelConfig") -> int:
    """Return the experts of a layer. Raises ConfigError if the ranks cannot hold whole experts of the model."""
    from ...proto.model.registry import check_expert_parallel, check_supported

    return check_expert_parallel(model, check_supported(model, 1)).count


def _encoder(model: "ModelConfig") -> str:
    """Return the end of the line about a model that says whether it reads images."""
    return (
        "" if model.vision is None else f", reads images ({_count(model.vision.num_parameters)} parameters)"
    )


def _count(number: int) -> str:
    """Return a number of parameters in words."""
    return f"{number / 1e9:.2f} B" if number >= 10**8 else f"{number / 1e6:.2f} M"


def _size(num_bytes: float) -> str:
    """Return a size in words."""
    for unit, shift, digits in (("GiB", 30, 1), ("MiB", 20, 1)):
        if num_bytes >= 0.1 * (1 << shift):
            return f"{num_bytes / (1 << shift):.{digits}f} {unit}"
    return f"{num_bytes / 1024:.0f} KiB"


def _parallel_sizes(model: "ModelConfig", num_gpus: int, expert_parallel: bool) -> list[int]:
    """Return the tensor-parallel sizes that the model allows, up to the number of GPUs."""
    from ...proto.errors import ConfigError
    from ...proto.model.registry import check_supported

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
    """Return a table with a line per figure and a column per tensor-parallel size, which 80 columns hold."""
    from rich import box
    from rich.table import Table

    from ..config.capacity import GIB

    lines: dict[str, list[str]] = {"weights per GPU": [_size(each.weight_bytes) for each in found]}
    if has_slots:
        lines["LoRA slots per GPU"] = [f"{each.lora_bytes / GIB:.2f} GiB" for each in found]
    lines["KV per token and GPU"] = [f"{each.kv_token_bytes / 1024:.1f} KiB" for each in found]
    if any(each.state_bytes for each in found):
        lines["state per row and GPU"] = [_size(each.state_bytes) for each in found]
        lines["state slots"] = [f"{each.num_state_slots:,}" for each in found]
    lines["KV tokens"] = [
        f"{each.num_kv_tokens:,}" if each.num_kv_tokens else "does not fit" for each in found
    ]
    for length in sorted({min(_TYPICAL_LEN, context_len), context_len}):
        lines[f"sequences of {length:,}"] = [
            f"{each.concurrency(length):,.1f}" if each.num_kv_tokens else "" for each in found
        ]
    table = Table("tensor parallel", title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for each in found:
        table.add_column(str(each.tensor_parallel_size), justify="right", no_wrap=True)
    for name, cells in lines.items():
        table.add_row(name, *cells)
    return table
