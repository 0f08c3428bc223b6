"""Kernel variants that a rank needs: recorded on a GPU that is not there, and compiled by several processes."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ...proto.config import EngineConfig
from ..comm.communicator import Arrival, Arrived, RowCounts, nothing
from ..rank.runner import ModelRunner
from .absent_gpu import install


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with the types, constants and alignments of its arguments.

    Attributes:
        module, name: of the kernel.
        data: of the variant, as Triton serializes it.
        signature: the types of its arguments, pickled: in `data` the fields of named tuples have no names.
    """

    module: str
    name: str
    data: str
    signature: bytes


# Stands in for a compiled kernel.
_NOT_LAUNCHED = object()


class _AbsentDriver:
    """Driver of a GPU that is not there. Triton asks it for the target only, as long as nothing is launched."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _AbsentGroup:
    """Communicator of one rank whose group is not there."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor] * self.size)

    def all_to_all(self, rows: Tensor, counts: RowCounts) -> Arrival:
        return Arrived(rows.new_empty((sum(own[self.rank] for own in counts), *rows.shape[1:])))

    def barrier(self) -> None:
        pass

    def meet(self, timeout_s: float) -> None:
        pass

    def close(self, drop_recordings: Callable[[], object] = nothing) -> None:
        drop_recordings()


def record_variants(config: EngineConfig, ranks: list[int], capability: int, gpu_bytes: int) -> list[Variant]:
    """Return the variants that ranks of an engine launch until they are ready.

    Torch's CUDA is replaced for the rest of the process: call it in a process of its own.

    Args:
        config: as resolved for the GPU, with few KV blocks.
        ranks: numbers of the ranks, which may differ by what they hold.
        capability: compute capability times 10.
        gpu_bytes: memory of a GPU.

    Raises:
        ConfigError: the model is not supported.
        ModelLoadError: the model's files cannot be read.
    """
    # Kernels of other libraries are compiled by these.
    parallel = replace(
        config.parallel,
        attention_backend="triton",
        linear_backend="triton",
        moe_backend="triton",
        linear_attention_backend="triton",
    )
    config = replace(config, parallel=parallel)
    variants = note_variants(capability)
    install(capability, gpu_bytes)
    size = config.parallel.tensor_parallel_size
    for rank in ranks:
        runner = ModelRunner(config, _AbsentGroup(rank, size), device=torch.device("cuda", 0))
        num_blocks = config.cache.num_kv_blocks
        assert num_blocks is not None
        runner.allocate_cache(num_blocks)
        runner.close()
    return list(variants)


def note_variants(capability: int) -> dict[Variant, None]:
    """Let launches of this process only choose their variants; return these, which grow with each launch."""
    driver.set_active(_AbsentDriver(capability))
    variants: dict[Variant, None] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernel = fn.jit_function
        signature = pickle.dumps(compile["signature"])
        variants[Variant(fn.module, kernel.fn.__name__, compile["specialization_data"], signature)] = None
        kernel.device_caches[0][0][compile["key"]] = _NOT_LAUNCHED  # so that it is noted once
        return True  # as if it were being compiled

    triton.knobs.runtime.jit_cache_hook = note
    launch = JITFunction.run

    def bind_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = bind_only
    return variants


def compile_variant(variant: Variant, capability: int) -> str | None:
    """Compile a variant to Triton's cache on disk, in any process; return why it cannot be."""
    driver.set_active(_AbsentDriver(capability))
    kernel = getattr(importlib.import_module(variant.module), variant.name)
    signature = pickle.loads(variant.signature)  # noqa: S301  (from the process that started this one)
    compile_with = kernel._do_compile

    def compile_with_names(key: Any, unnamed: Any, *rest: Any, **options: Any) -> Any:
        return compile_with(key, signature, *rest, **options)

    kernel._do_compile = compile_with_names
    try:
        kernel.preload(variant.data)
    except Exception as error:
        return f"{variant.module}.{variant.name}: {type(error).__name__}: {error}"
    finally:
        kernel._do_compile = compile_with
    return None


def compile_variants(
    variants: list[Variant], capability: int, num_processes: int
) -> Iterator[tuple[Variant, str | None]]:
    """Compile variants in parallel processes; yield each with its problem when it is done."""
    processes = ProcessPoolExecutor(num_processes, mp_context=get_context("spawn"))
    try:
        calls = {processes.submit(compile_variant, each, capability): each for each in variants}
        for call in as_completed(calls):
            yield calls[call], call.result()
    finally:
        with suppress(OSError):
            processes.shutdown(cancel_futures=True)
