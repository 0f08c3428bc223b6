"""Memory of GPUs by name, for estimates without the GPU at hand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ...proto.errors import ConfigError

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
    "mi250x": 128,
    "mi300x": 192,
    "mi325x": 256,
    "mi355x": 288,
}
# The driver and the memory's error correction keep some of it.
_USABLE = 0.96
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|GiB)", re.IGNORECASE)
# Prefix of the resource by which Ray names a node's kind of GPU, and names that are not those of GPU_MEMORY_GB. The
# same name stands for both sizes of an A100.
_RAY_PREFIX = "accelerator_type:"
_RAY_NAMES = {"a100": "a100-40", "a100-40g": "a100-40", "a100-80g": "a100", "a10g": "a10"}
_UNIT_BYTES = {"gb": 10**9, "gib": 1 << 30}


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
