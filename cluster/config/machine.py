"""Machines: their cores and GPUs, the memory of GPUs by name, and the default limits of a step by that memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...proto.errors import ConfigError
from ...worker import cuda_device_count
from .nvml import smallest_gpu_bytes

GIB = 1 << 30
# name |-> GB, as the vendors' data sheets have it. The larger variant of a GPU that exists in two sizes has a suffix.
GPU_MEMORY_GB = {
    "t4": 16,
    "l4": 24,
    "a10": 24,
    "rtx4090": 24,
    "rtx5090": 32,
    "v100": 32,
    "a100-40": 40,
    "l40s": 48,
    "a6000": 48,
    "a100": 80,
    "h100": 80,
    "h100-nvl": 94,
    "rtx-pro-6000": 96,
    "gh200": 144,
    "h200": 141,
    "b200": 180,
    "b300": 288,
}
# The driver and the memory's error correction keep some of it.
_USABLE = 0.96
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|GiB)", re.IGNORECASE)
# Prefix of the resource by which Ray names a node's kind of GPU, and names that are not those of GPU_MEMORY_GB. The
# same name stands for both sizes of an A100.
_RAY_PREFIX = "accelerator_type:"
_RAY_NAMES = {"a100": "a100-40", "a100-40g": "a100-40", "a100-80g": "a100", "a10g": "a10"}
_UNIT_BYTES = {"gb": 10**9, "gib": 1 << 30}


@dataclass(frozen=True, slots=True)
class Machine:
    """The cores and CUDA GPUs that the ranks of a replica share.

    Attributes:
        gpu_bytes: memory of the smallest GPU; 0 if it is not known.
    """

    num_cores: int
    num_gpus: int
    gpu_bytes: int = 0

    @staticmethod
    def this() -> Machine:
        """Return the machine of this process."""
        return Machine(len(os.sched_getaffinity(0)), cuda_device_count(), smallest_gpu_bytes())


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Defaults of the options of these names."""

    max_num_seqs: int
    max_num_batched_tokens: int


# Least bytes of a GPU |-> defaults, the largest first; the last one is for CPUs and GPUs of unknown size, too.
# A larger batch shares each read of the weights. Its logits and activations must fit beside the KV cache.
STEP_LIMITS: dict[int, StepLimits] = {
    70 * GIB: StepLimits(1024, 8192),
    40 * GIB: StepLimits(256, 8192),
    0: StepLimits(64, 2048),
}
# Selects the largest defaults, for checks that must refuse nothing that some GPU may do.
LARGE_GPU_BYTES = max(STEP_LIMITS)


def step_limits(gpu_bytes: int) -> StepLimits:
    """Return the defaults for a GPU.

    Args:
        gpu_bytes: its memory; 0 for a CPU, and if it is not known.
    """
    return next(limits for least, limits in STEP_LIMITS.items() if gpu_bytes >= least)


def gpu_bytes(text: str) -> int:
    """Return the usable memory of a GPU.

    Args:
        text: a name of GPU_MEMORY_GB in any case, or a size such as ``80GB``.

    Raises:
        ConfigError: the text is neither.
    """
    if size := _SIZE.fullmatch(text.strip()):
        return int(float(size[1]) * _UNIT_BYTES[size[2].lower()] * _USABLE)
    name = text.strip().lower().replace("_", "-").replace(" ", "-")
    if name not in GPU_MEMORY_GB:
        known = ", ".join(GPU_MEMORY_GB)
        raise ConfigError(f"gpu is {text!r}, must be a size such as 80GB, or one of {known}")
    # Vendors' GB are 2**30 bytes.
    return int(GPU_MEMORY_GB[name] * (1 << 30) * _USABLE)


def smallest_gpu_of_nodes(nodes: Iterable[Mapping[str, float]]) -> int:
    """Return the usable memory of the smallest GPU of Ray nodes; 0 if one of them has an unknown kind.

    Args:
        nodes: resources of each node, among them ``accelerator_type:NAME``.
    """
    return min((_bytes_of_node(resources) for resources in nodes), default=0)


def _bytes_of_node(resources: Mapping[str, float]) -> int:
    names = [name.removeprefix(_RAY_PREFIX).lower() for name in resources if name.startswith(_RAY_PREFIX)]
    known = [_RAY_NAMES.get(name, name) for name in names]
    return min((gpu_bytes(name) if name in GPU_MEMORY_GB else 0 for name in known), default=0)
