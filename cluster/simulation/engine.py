"""A simulated engine: the configuration of a model's replica on given devices, and the time of its steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ...proto.config import EngineConfig, ModelConfig
from ...proto.errors import ConfigError
from ...proto.kv_layout import QUANTIZED_KV
from ...proto.model.registry import check_supported
from ...proto.options.sections import DTYPES
from ...worker import WeightSize, make_meta_model, measure_weights
from ..config.capacity import Workload, capacity
from ..config.engine_options import EngineOptions
from ..config.machine import GIB, gpu_bytes
from ..config.model_source import describe_files
from ..config.resolve import engine_config
from .step_time import (
    ASSUMED,
    ASSUMED_ON_CPU,
    ModelCost,
    StepTime,
    find_device,
    read_coefficients,
)
from .traces import VOCAB_SIZE

CPU = "cpu"
# KV memory of a rank on a CPU, unless it is given: the default of `quire serve`.
_CPU_KV_BYTES = 512 << 20
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ALL_REDUCES_PER_LAYER = 2


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """A replica's configuration, with its number of KV blocks, and the time of its steps.

    Attributes:
        num_gpus: of a replica.
    """

    config: EngineConfig
    step_time: StepTime

    @property
    def num_gpus(self) -> int:
        return self.config.parallel.tensor_parallel_size

    @property
    def num_kv_tokens(self) -> int:
        assert self.config.cache.num_kv_blocks is not None
        return (self.config.cache.num_kv_blocks - 1) * self.config.cache.block_size


class Models:
    """Models that were measured: planning asks for the same one many times."""

    def __init__(self) -> None:
        self._measured: dict[tuple[str, int], tuple[ModelConfig, WeightSize]] = {}

    def measure(self, options: EngineOptions, dtype_bytes: int | None) -> tuple[ModelConfig, WeightSize]:
        """Return a model and the size of its weights, from its configuration alone.

        Raises:
            ModelLoadError: its configuration cannot be read.
        """
        key = options.model, dtype_bytes or 0
        if key not in self._measured:
            model = describe_files(options)
            size = dtype_bytes or DTYPES.get(model.dtype, 2)
            self._measured[key] = model, measure_weights(model, make_meta_model(model), size)
        return self._measured[key]


def make_engine(
    options: EngineOptions, gpu: str, coefficients: Path | None = None, models: Models | None = None
) -> SimulatedEngine:
    """Return the engine of options on a device.

    Args:
        coefficients: file of `quire calibrate`; None to assume them.

    Raises:
        ConfigError: the device is not known, or the model does not fit or does not allow an option.
        ModelLoadError: the model's configuration cannot be read.
    """
    device = find_device(gpu)
    if options.speculative_config is not None:
        raise ConfigError("speculative_config: drafts are not simulated; leave it out")
    if options.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size is {options.pipeline_parallel_size}, must be 1: stages are not simulated"
        )
    # CPUs compute in 32 bits unless another type is asked for.
    dtype = {"auto": "float32"}.get(options.dtype, options.dtype) if device.name == CPU else options.dtype
    dtype_bytes = DTYPES.get(dtype)
    model, weights = (models or Models()).measure(options, dtype_bytes)
    if options.max_model_len is not None:
        model = replace(model, max_model_len=min(options.max_model_len, model.max_model_len))
    tp = options.tensor_parallel_size
    check_supported(model, tp, expert_parallel=options.enable_expert_parallel)
    memory = 0 if device.name == CPU else gpu_bytes(device.name)
    bare = engine_config(options, model, device="cpu" if device.name == CPU else "cuda", gpu_bytes=memory)
    dtype_bytes = dtype_bytes or DTYPES.get(model.dtype, 2)
    num_blocks, kv_token_bytes = _kv_cache(options, bare, weights, memory, dtype_bytes)
    config = bare.with_num_blocks(num_blocks)
    # Prompts of traces have ids of their own, which a small vocabulary lacks.
    simulated = replace(config.model, vocab_size=max(VOCAB_SIZE, model.vocab_size))
    config = replace(config, model=simulated)
    if coefficients is None:
        known = ASSUMED_ON_CPU if device.name == CPU else ASSUMED
        source = "assumed: no step was measured"
    else:
        known, source = read_coefficients(coefficients, device.name), f"measured: {coefficients.name}"
    cost = model_cost(model, weights, tp, kv_token_bytes, dtype_bytes)
    return SimulatedEngine(config, StepTime(cost, device, known, source))


def model_cost(
    model: ModelConfig, weights: WeightSize, tp: int, kv_token_bytes: float, dtype_bytes: int
) -> ModelCost:
    """Return what one of `tp` ranks reads, multiplies and sends."""
    num_experts = next((int(model.hf[name]) for name in _NUM_EXPERTS if model.hf.get(name)), 0)
    num_used = int(model.hf.get("num_experts_per_tok") or num_experts)
    share = num_used / num_experts if num_experts else 1.0
    routed = weights.routed_bytes / weights.num_bytes if num_experts else 0.0
    hidden = int(model.hf.get("hidden_size") or model.num_heads * model.head_dim)
    # Looking up a token's embedding takes no products, unless the table is also the head.
    is_tied = bool(model.hf.get("tie_word_embeddings"))
    num_embedded = 0 if is_tied else model.vocab_size * hidden
    num_multiplied = (weights.num_parameters - num_embedded) * (1 - routed + routed * share)
    embedded_bytes = num_embedded * dtype_bytes
    return ModelCost(
        weight_bytes=(weights.num_bytes - embedded_bytes) * (1 - routed) / tp,
        flops_per_token=2.0 * num_multiplied / tp,
        kv_bytes_per_token=kv_token_bytes,
        expert_bytes=weights.num_bytes * routed / tp,
        expert_share=share,
        flops_per_pair=4.0 * model.num_heads * model.head_dim * model.num_layers / tp,
        num_all_reduces=_ALL_REDUCES_PER_LAYER * model.num_layers if tp > 1 else 0,
        all_reduce_bytes_per_token=2.0 * hidden * dtype_bytes * (tp - 1) / tp,
    )


def _kv_cache(
    options: EngineOptions, config: EngineConfig, weights: WeightSize, memory: int, dtype_bytes: int
) -> tuple[int, float]:
    """Return the blocks of a rank's KV cache, the scratch block included, and the bytes of a token in it.

    Raises:
        ConfigError: the model does not fit.
    """
    tp = options.tensor_parallel_size
    limits = config.scheduler
    workload = Workload(
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        options.gpu_memory_utilization,
        dtype_bytes,
        1 if options.kv_cache_dtype in QUANTIZED_KV else dtype_bytes,
    )
    found = capacity(config.model, weights.rank_bytes(tp), memory, tp, workload)
    if options.num_kv_blocks is not None:
        return options.num_kv_blocks, found.kv_token_bytes
    kv_bytes = options.kv_cache_memory or (0 if memory else _CPU_KV_BYTES)
    num_tokens = kv_bytes // found.kv_token_bytes if kv_bytes else found.num_kv_tokens
    num_blocks = num_tokens // options.block_size
    if num_blocks < 2:
        raise ConfigError(
            f"{config.model.name} does not fit on {tp} x {memory / GIB:.0f} GiB: its weights take "
            f"{weights.rank_bytes(tp) / GIB:.1f} GiB of each"
        )
    return num_blocks + 1, found.kv_token_bytes
