"""Default limits of a step by the memory of a GPU."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


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
