"""Policy of snapshots: where a sequence's state is saved, which snapshot is dropped first, and how many may stay."""

from __future__ import annotations

# A snapshot must save at least this many blocks of tokens: it costs a copy, and often a step that ends early.
MIN_SNAPSHOT_BLOCKS = 2
# Share of the slots that snapshots keep while rows wait, if earlier prompts had all tokens of the new ones. With half
# as many slots as sequences a multi-turn trace finds 62 % of its tokens instead of 8 %, and 73 % with a share of 0.5,
# which takes 17 % more time: fewer sequences run.
RESERVED_SHARE = 0.25
# What a prompt leaves of the counts of the prompts before it: about 16 prompts count.
KEPT_PER_PROMPT = 15 / 16


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


class SharedPrompts:
    """The share of the newest prompts' tokens that earlier ones had, and the slots that are kept for snapshots.

    Rows that took all slots would leave no snapshot of a prompt until it comes again. What the cached blocks have of
    a prompt tells what snapshots could save, also while there are none. Prompts that share nothing leave all slots
    to the rows.
    """

    def __init__(self) -> None:
        self._num_tokens = self._num_shared_tokens = 0.0

    def count(self, num_tokens: int, num_shared_tokens: int) -> None:
        """Count a prompt of `num_tokens`, whose first `num_shared_tokens` are in cached blocks."""
        self._num_tokens = KEPT_PER_PROMPT * self._num_tokens + num_tokens
        self._num_shared_tokens = KEPT_PER_PROMPT * self._num_shared_tokens + num_shared_tokens

    def num_reserved(self, num_slots: int) -> int:
        """Return how many of the slots rows leave to snapshots."""
        share = self._num_shared_tokens / self._num_tokens if self._num_tokens else 0.0
        return int(RESERVED_SHARE * share * num_slots)
