"""Libraries whose kernels quire can use: their names, what they need, and whether they are installed.

Imports neither torch nor the libraries, so that `quire doctor` can ask.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from contextlib import suppress
from dataclasses import dataclass, replace

# Compute capability of a GPU.
Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Library:
    """A library of kernels.

    Attributes:
        option: its value of the option that selects it.
        title: its name in logs.
        use: what it computes.
        modules: names under which it may be imported.
        packages: names under which it may be installed.
        least, below: the compute capabilities that it supports, from `least` on, and before `below`.
    """

    option: str
    title: str
    use: str
    modules: tuple[str, ...]
    packages: tuple[str, ...]
    least: Capability
    below: Capability

    @property
    def version(self) -> str:
        """Return the installed version; ``unknown`` without a package, and empty if no module is found."""
        if not any(_has_module(name) for name in self.modules):
            return ""
        for name in self.packages:
            with suppress(importlib.metadata.PackageNotFoundError):
                return importlib.metadata.version(name)
        return "unknown"

    def find_problem(self, capability: Capability) -> str:
        """Return why the library cannot be used on a GPU; empty if it can."""
        if not self.version:
            return f"it is not installed (no module {' or '.join(self.modules)})"
        return self.find_misfit(capability)

    def find_misfit(self, capability: Capability) -> str:
        """Return why the library, once installed, would not support a GPU; empty if it would."""
        if self.least <= capability < self.below:
            return ""
        numbers = [".".join(map(str, each)) for each in (capability, self.least, self.below)]
        return "the GPU has compute capability {}, it supports {} up to {}".format(*numbers)


FLASHINFER = Library(
    "flashinfer", "FlashInfer", "attention", ("flashinfer",), ("flashinfer-python",), (8, 0), (13, 0)
)
# Its kernels for sums are compiled for Hopper and later.
FLASHINFER_SUMS = replace(FLASHINFER, use="sums over ranks", least=(9, 0))
FLASH_ATTENTION = Library(
    "flash_attn",
    "FlashAttention 3",
    "attention of prompts",
    ("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
    ("flash_attn_3", "flash-attn-3"),
    (9, 0),
    (10, 0),
)
# On later GPUs its scales are powers of two, which those of checkpoints often are not.
DEEP_GEMM = Library(
    "deep_gemm",
    "DeepGEMM",
    "linear layers and experts in float8 with a scale per block",
    ("deep_gemm",),
    ("deep_gemm", "deep-gemm"),
    (9, 0),
    (10, 0),
)
FLASH_LINEAR_ATTENTION = Library(
    "fla",
    "flash-linear-attention",
    "gated delta nets and Kimi delta attention of prompts",
    ("fla",),
    ("flash-linear-attention", "fla-core"),
    (8, 0),
    (13, 0),
)
LIBRARIES = (FLASHINFER, FLASH_ATTENTION, DEEP_GEMM, FLASH_LINEAR_ATTENTION)


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # of a missing parent, and of a module without a spec
        return False
