"""Machine: the cores and GPUs that the ranks of a replica share."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ...worker.rank.device import cuda_device_count
from ...worker.rank.nvml import smallest_gpu_bytes


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
