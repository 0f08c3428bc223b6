"""Memory of a GPU that is available for the KV cache."""

from __future__ import annotations

from collections.abc import Callable

import torch


def available_kv_bytes(total: int, free: int, reserved: int, peak: int, utilization: float) -> int:
    """Return the bytes of a GPU that the KV cache may take.

    Args:
        total, free: of the whole GPU, as the driver reports them.
        reserved: by this process at the time of `free`.
        peak: largest allocation of this process during the profile run.
        utilization: fraction of the GPU that all processes together may use.
    """
    # Other processes start and end during the profile run: `free + reserved` can exceed `total`.
    used_by_others = max(0, total - free - reserved)
    return max(0, int(total * utilization) - used_by_others - peak)


def profile_kv_bytes(
    device: torch.device, utilization: float, profile_run: Callable[[], None], record: Callable[[], object]
) -> int:
    """Return available_kv_bytes of this GPU, with the peak of one `profile_run` and the memory of recordings.

    Args:
        record: makes the recordings and returns them, for this function to drop after it has measured them. A
            recording holds memory of torch's allocator and of the driver.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    profile_run()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free_before, _ = torch.cuda.mem_get_info(device)
    recordings = record()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    peak += max(0, free_before - torch.cuda.mem_get_info(device)[0])
    del recordings
    torch.cuda.empty_cache()
    return available_kv_bytes(total, free, reserved, peak, utilization)
