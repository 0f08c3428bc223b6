"""EngineOptions: what an operator may choose of a replica's engine, under the names of `quire serve`'s options."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ...proto.config import EngineConfig
from .resolve import Machine, resolve


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The arguments of `resolve`, which says what each means, with the defaults of a server."""

    model: str
    served_model_name: str | None = None
    tensor_parallel_size: int = 1
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_memory: int | None = None
    num_kv_blocks: int | None = None
    num_host_kv_blocks: int = 0
    kv_cache_dtype: str = "auto"
    prefix_caching: bool = True
    batch_invariant: bool = False
    fused_all_reduce: bool = False
    cuda_graphs: bool = True
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_queue_len: int = 4096
    policy: str = "fcfs"
    tenant_weights: tuple[tuple[str, float], ...] = ()
    step_timeout_s: float = 60.0
    audit: bool = False
    seed: int = 0

    def resolve(self, machine: Machine | None = None) -> EngineConfig:
        """Raises ConfigError where the model or the machine (None: this one) does not allow it."""
        return resolve(machine=machine, **self.engine_options())

    def engine_options(self) -> dict[str, Any]:
        """The options by name."""
        return {field.name: getattr(self, field.name) for field in fields(EngineOptions)}
