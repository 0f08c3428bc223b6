"""Cache groups: the layers of a model by the tokens whose keys and values they need.

A layer with a window reads only the last tokens of a sequence, so its blocks for earlier tokens can be freed. All
blocks have the same bytes: the layers are cut into groups of at most `layers_per_block` layers of one window, and
a block holds the tokens of one group. One pool then serves all groups, each of which has block tables of its own.

Layers may differ in the bytes of a token (Gemma 4). A block has places for layers of the largest size; the places of
a group with smaller layers are split into sub-blocks, each of which holds one layer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

# A group costs the scheduler and the ranks a block table per row. Gemma 3 has 7 groups.
MAX_GROUPS = 8
# Share of the KV memory of the longest sequence that groups must save, for the work that they cost.
MIN_SAVING = 0.05


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose keys and values are in the same blocks.

    Attributes:
        window: tokens that a token attends to, itself included; 0 for all.
        layers: numbers of the layers, at most `split` for each of the block's places.
        split: sub-blocks of a place; 1 unless the group's layers are smaller than others.
    """

    window: int
    layers: tuple[int, ...]
    split: int = 1

    def first_block(self, position: int, block_size: int) -> int:
        """Return the index of the first block that tokens at `position` and later attend to."""
        return max(0, position + 1 - self.window) // block_size if self.window else 0

    def num_retained_tokens(self, num_tokens: float) -> float:
        """Return how many of a sequence's tokens the group needs while it decodes."""
        return min(num_tokens, self.window) if self.window else num_tokens


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The cache groups of a model.

    Attributes:
        groups: the groups without a window come first.
        layers_per_block: layers of the largest size that a block has room for, its places; with one group, all
            layers.
    """

    groups: tuple[CacheGroup, ...]
    layers_per_block: int

    @property
    def has_windows(self) -> bool:
        return any(group.window for group in self.groups)

    @property
    def splits(self) -> tuple[int, ...]:
        """The sub-blocks of a place in each group."""
        return tuple(group.split for group in self.groups)

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    def group_of_layers(self) -> list[int]:
        """Return the index of each layer's tables, which each sub-block of each group has."""
        index_of, first = dict[int, int](), 0
        for group in self.groups:
            index_of |= {layer: first + number % group.split for number, layer in enumerate(group.layers)}
            first += group.split
        return [index_of[layer] for layer in range(self.num_layers)]

    def num_hit_blocks(self, block_size: int) -> int:
        """Return how many of a cached prefix's last blocks a hit needs in the first group; 0 for all of them."""
        window = self.groups[0].window
        return -(-(window - 1) // block_size) if window > 1 else 0

    def num_slots(self, num_tokens: float) -> float:
        """Return the tokens of blocks that a decoding sequence needs in all groups together."""
        return sum(group.num_retained_tokens(num_tokens) for group in self.groups)

    def max_held_blocks(self, step_tokens: int, block_size: int) -> tuple[int | None, ...]:
        """Return the most blocks that a sequence needs at once in each group; None without a window.

        A step of `step_tokens` tokens needs the window before its first token as well. One block more for each end
        that is within a block, and for the beginning of a block that is copied.
        """
        return tuple(
            -(-(group.window - 1 + step_tokens) // block_size) + 2 if group.window else None
            for group in self.groups
        )

    def max_blocks_per_seq(self, num_blocks: int, most: int, step_tokens: int, block_size: int) -> int:
        """Return the largest number of blocks of tokens, at most `most`, that a pool can hold of one sequence."""
        if not self.has_windows:
            return min(most, num_blocks // len(self.groups))
        limits = self.max_held_blocks(step_tokens, block_size)

        def num_held(length: int) -> int:
            return sum(length if limit is None else min(length, limit) for limit in limits)

        return bisect_right(range(most + 1), num_blocks, key=num_held) - 1


@lru_cache(maxsize=64)
def make_layout(
    num_layers: int,
    windows: tuple[int, ...],
    max_len: int,
    draft_layers: float,
    sizes: tuple[int, ...] = (),
) -> CacheLayout:
    """Return the groups that need the least memory for the longest sequence, and of these the fewest.

    Args:
        windows: window of each layer, 0 for none; empty if no layer has a window.
        max_len: tokens of the longest sequence.
        draft_layers: KV of a draft model's token, in layers of this model. It is part of each block and used in
            those of the first group, which has no window then.
        sizes: numbers that each layer caches for a token; empty if they are equal. Layers of which the largest is no
            multiple, and layers that differ in a model with a draft model, are one group.
    """
    whole = CacheLayout((CacheGroup(0, tuple(range(num_layers))),), num_layers)
    in_effect = tuple(window if window < max_len else 0 for window in windows)
    largest = max(sizes, default=1)
    splits = tuple(largest // size for size in sizes) or (1,) * num_layers
    cannot_split = any(largest % size for size in sizes) or (draft_layers and max(splits) > 1)
    if not any(in_effect) or cannot_split or (draft_layers and all(in_effect)):
        return whole

    def cost(layout: CacheLayout) -> float:
        return (layout.layers_per_block + draft_layers) * layout.num_slots(max_len)

    found = min(_layouts(in_effect, splits), key=cost, default=whole)
    cost_of_whole = (sum(1 / split for split in splits) + draft_layers) * max_len
    return found if cost(found) <= (1 - MIN_SAVING) * cost_of_whole else whole


def _layouts(windows: tuple[int, ...], splits: tuple[int, ...]) -> Iterator[CacheLayout]:
    """Yield the layouts of at most MAX_GROUPS groups, the one with the fewest groups first.

    Args:
        splits: splits of each layer, as in CacheGroup.
    """
    layers = list(enumerate(zip(windows, splits, strict=True)))
    kinds = sorted({kind for _, kind in layers}, key=lambda kind: (kind[0] > 0, -kind[0], kind[1]))
    for num_places in range(len(windows), 0, -1):
        groups: list[CacheGroup] = []
        for window, split in kinds:
            alike = [layer for layer, kind in layers if kind == (window, split)]
            size = num_places * split
            groups += (
                CacheGroup(window, tuple(alike[start : start + size]), split)
                for start in range(0, len(alike), size)
            )
        if len(groups) <= MAX_GROUPS:
            yield CacheLayout(tuple(groups), num_places)
