"""Memory for states: how many slots the layers that keep a state of each sequence get, beside the KV blocks."""

from __future__ import annotations

from .errors import ConfigError

# Share of the memory that states of running sequences take at most; with less memory fewer of them run at once.
MAX_RUNNING_SHARE = 0.5
# Share of what these leave that snapshots get; the blocks get the rest.
SNAPSHOT_SHARE = 0.25
# More snapshots for each running sequence are of no use; the lookup of the one to drop takes longer.
MAX_SNAPSHOTS_PER_SEQUENCE = 16
# Memory for the KV cache of a rank on a CPU, unless an option gives another one.
DEFAULT_CPU_KV_BYTES = 512 << 20


def choose_num_slots(name: str, max_num_seqs: int, state_bytes: int, kv_bytes: int, memory: int) -> int:
    """Return the number of state slots of a rank, the scratch slot included.

    Args:
        name: the model's, for errors.
        state_bytes: of one slot.
        kv_bytes: of the KV of `max_num_seqs` sequences of the greatest length. Memory beyond it is for snapshots: in
            a model of which no layer has keys and values, nearly all.
        memory: bytes for blocks and states together.

    Raises:
        ConfigError: not even one sequence's state fits; states the sizes.
    """
    num_running = min(max_num_seqs, int(MAX_RUNNING_SHARE * memory) // state_bytes - 1)
    if num_running < 1:
        least = round(2 * state_bytes / MAX_RUNNING_SHARE)
        raise ConfigError(
            f"{name}: a sequence's state takes {in_mib(state_bytes)} per rank, and KV memory is {in_mib(memory)}; at "
            f"least {in_mib(least)} are needed: raise kv_cache_memory, or tensor_parallel_size"
        )
    num_left = memory - (1 + num_running) * state_bytes
    num_snapshots = int(max(SNAPSHOT_SHARE * num_left, num_left - kv_bytes)) // state_bytes
    return 1 + num_running + min(num_snapshots, MAX_SNAPSHOTS_PER_SEQUENCE * max_num_seqs)


def in_mib(num_bytes: int) -> str:
    """Return a size for people: ``1.5 MiB``."""
    return f"{num_bytes / 2**20:,.3g} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:,.2f} GiB"
