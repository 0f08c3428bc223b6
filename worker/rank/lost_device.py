"""Errors after which a process can use its GPU no more, and their distinction from those of a step alone."""

from __future__ import annotations

import re

from ...proto.errors import RankFailed

# Messages of CUDA's runtime and driver, as torch, Triton and NCCL repeat them. CUDA returns such an error from every
# later call; its documentation says of each that the process must be ended. A GPU's Xid shows as one of them.
_LOST = re.compile(
    r"(cuda|nccl) ?(error|failure)?\b.*("
    r"illegal memory access|illegal address|illegal instruction|misaligned address|invalid program counter|"
    r"not supported on global/shared address space|hardware stack error|device-side assert|launch failure|"
    r"launch timed out|ecc error|nvlink error|nvlink or a hardware error|tensor memory not completely freed|"
    r"context is destroyed|unhandled cuda error|unknown error)",
    re.IGNORECASE,
)


def loses_device(problem: str) -> bool:
    """Return whether a process with this error can use its GPU no more."""
    return _LOST.search(problem) is not None


def step_failed(rank: int, problem: str, step_id: int, stage: str) -> RankFailed:
    """Return the error of a failed step, which is a step error unless the rank has lost its device."""
    return RankFailed(rank, problem, step_id, stage, is_step_error=not loses_device(problem))
