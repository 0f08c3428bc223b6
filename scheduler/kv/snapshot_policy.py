"""Policy of snapshots: where a sequence's state is saved, and which snapshot is dropped first. Pure functions."""

from __future__ import annotations

# A snapshot must save at least this many blocks of tokens: it costs a copy, and often a step that ends early.
MIN_SNAPSHOT_BLOCKS = 2


def snapshot_ends(
    num_cached_tokens: int, num_shared_blocks: int, num_tokens: int, block_size: int, *, is_reused: bool
) -> tuple[int, ...]:
    """Return the numbers of tokens, ascending, after which a prompt's state is saved.

    The end of the prompt serves the next turn of a conversation and the same prompt again. The blocks of another
    sequence that begin this one too, without a snapshot there, show where prompts branch: the second request with a
    prefix computes it again and saves its state for the third.

    Args:
        num_cached_tokens: of the prompt, which the sequence does not compute.
        num_shared_blocks: first blocks of the prompt that are cached, for which there may be no snapshot.
        num_tokens: all tokens of the prompt.
        is_reused: later sequences may continue this one; False for a prompt that is pooled.
    """
    least = MIN_SNAPSHOT_BLOCKS * block_size
    # The last token is always computed again.
    branch, last = num_shared_blocks * block_size, (num_tokens - 1) // block_size * block_size
    ends = list[int]()
    if branch - num_cached_tokens >= least:
        ends.append(branch)
    if is_reused and last - max([num_cached_tokens, *ends]) >= least:
        ends.append(last)
    return tuple(ends)


def snapshot_value(num_saved_tokens: int, num_hits: int, clock: float) -> float:
    """Return the value of a snapshot; that with the smallest is dropped first, and `clock` becomes its value.

    All snapshots have the same bytes, so this is GreedyDual-Size-Frequency (Cherkasova, 1998): tokens saved per byte,
    as often as it was hit, and the clock ages those that are not hit.

    Args:
        num_saved_tokens: tokens that a hit saves, beyond the snapshot that was there before.
    """
    return clock + num_saved_tokens * (1 + num_hits)
