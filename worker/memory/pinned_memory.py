"""Page-locked host memory, which a GPU reads and writes while the host goes on."""

from __future__ import annotations

import math
import mmap
import weakref

import numpy as np
import torch
from torch import Tensor


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros in page-locked memory, which is freed with the tensor.

    The memory has exactly the tensor's bytes and is never copied. torch's allocator of pinned memory rounds up to a
    power of two, and keeps what is freed.

    Raises:
        MemoryError: the system cannot lock that many bytes.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    address = buffer.ctypes.data
    cudart = torch.cuda.cudart()
    status = int(cudart.cudaHostRegister(address, num_bytes, 0))
    if status:
        raise MemoryError(f"cannot lock {num_bytes} bytes of host memory: CUDA error {status}")
    # At exit CUDA is gone before this would run.
    weakref.finalize(buffer, cudart.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(buffer).view(dtype).view(shape)
