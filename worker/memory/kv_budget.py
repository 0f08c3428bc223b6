"""How much memory of a GPU is left for keys and values."""

from __future__ import annotations

from collections.abc import Callable

import torch


def left_for_kv(total: int, free: int, reserved: int, peak: int, share: float) -> int:
    """Bytes of a GPU that keys and values may take.

    Args:
        total, free: of the whole GPU, as it says itself.
        reserved: what this process holds at that moment.
        peak: the most that this process needs besides.
        share: of the GPU, for everything that runs on it.
    """
    # Neighbours come and go while this is measured: what is free may be more than what they seem to leave.
    taken_by_others = max(0, total - free - reserved)
    return max(0, int(total * share) - taken_by_others - peak)


def measure_left_for_kv(device: torch.device, share: float, run_largest_step: Callable[[], None]) -> int:
    """left_for_kv of this GPU, with the peak of a step that is run for it."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return left_for_kv(total, free, reserved, peak, share)
