"""Cache groups: how layers are grouped, and what sequences need in each group."""

from __future__ import annotations

import pytest

from quire.proto.cache_groups import MAX_GROUPS, CacheGroup, CacheLayout, make_layout

# Layers, window and context of published models, with the full layers among the others.
GEMMA_3_27B = [0 if (layer + 1) % 6 == 0 else 1024 for layer in range(62)]
GPT_OSS_20B = [0 if layer % 2 else 128 for layer in range(24)]


# Layers of Gemma 4 31B with a window of 1,024 have 16 heads of 256 numbers, the others 4 of 512.
GEMMA_4_31B = [0 if (layer + 1) % 6 == 0 else 1024 for layer in range(60)]
GEMMA_4_SIZES = tuple(2 * 16 * 256 if window else 2 * 4 * 512 for window in GEMMA_4_31B)


def layout_of(windows: list[int], max_len: int = 131_072, draft_layers: float = 0.0) -> CacheLayout:
    return make_layout(len(windows), tuple(windows), max_len, draft_layers)


def test_layers_without_windows_are_one_group() -> None:
    for windows in ((), (0, 0, 0)):
        layout = make_layout(3, windows, 1000, 0)
        assert layout.groups == (CacheGroup(0, (0, 1, 2)),)
        assert layout.layers_per_block == 3
        assert not layout.has_windows


def test_layers_with_one_window_are_one_group() -> None:
    layout = layout_of([4096] * 32)
    assert layout.groups == (CacheGroup(4096, tuple(range(32))),)


@pytest.mark.parametrize(
    ("windows", "num_groups", "layers_per_block"), [(GEMMA_3_27B, 7, 10), (GPT_OSS_20B, 2, 12)]
)
def test_mixed_layers_are_groups_of_equal_size(
    windows: list[int], num_groups: int, layers_per_block: int
) -> None:
    layout = layout_of(windows)
    assert (len(layout.groups), layout.layers_per_block) == (num_groups, layers_per_block)
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in layout.groups for layer in group.layers)
    assert layout.groups[0].window == 0
    assert len(layout.groups) <= MAX_GROUPS


def test_window_of_the_whole_context_makes_no_group() -> None:
    assert len(layout_of([0, 1000], max_len=1000).groups) == 1
    assert len(layout_of([0, 990], max_len=1000).groups) == 1, "it would save less than a group costs"
    assert len(layout_of([0, 100], max_len=1000).groups) == 2


def test_draft_layers_need_a_group_without_a_window() -> None:
    assert not layout_of([64] * 4, draft_layers=1.0).has_windows
    assert layout_of([64, 0, 64, 0], draft_layers=1.0).groups[0].window == 0


def test_first_block_is_that_of_the_first_token_in_the_window() -> None:
    group = CacheGroup(6, (0,))
    # The token at position 9 attends to positions 4 to 9, at 8 to 3 to 8.
    assert [group.first_block(position, 4) for position in (0, 5, 8, 9, 12, 13)] == [0, 0, 0, 1, 1, 2]
    assert CacheGroup(0, (0,)).first_block(1000, 4) == 0
    assert CacheGroup(1, (0,)).first_block(8, 4) == 2


@pytest.mark.parametrize("window", [1, 2, 16, 17, 18, 33, 100])
def test_hit_needs_the_blocks_of_the_window(window: int) -> None:
    layout, end = make_layout(2, (window, window), 4096, 0), 40
    needed = end - layout.groups[0].first_block(end * 16, 16)
    assert layout.num_hit_blocks(16) == needed
    assert make_layout(2, (0, window), 4096, 0).num_hit_blocks(16) == 0


def test_longest_sequence_fills_the_pool() -> None:
    layout = layout_of([0, 8], max_len=1000)
    # Per block of 4 tokens one block of each group, up to the window, the step and the ends of the second: 6.
    assert layout.max_held_blocks(8, 4) == (None, 6)
    assert layout.max_blocks_per_seq(12, 250, 8, 4) == 6
    assert layout.max_blocks_per_seq(13, 250, 8, 4) == 7
    assert layout.max_blocks_per_seq(106, 250, 8, 4) == 100
    assert layout.max_blocks_per_seq(1000, 250, 8, 4) == 250
    assert make_layout(2, (), 1000, 0).max_blocks_per_seq(7, 250, 8, 4) == 7


def test_sequences_keep_the_last_tokens_of_a_window() -> None:
    layout = layout_of([0, 100], max_len=1000)
    assert layout.num_slots(50) == 100
    assert layout.num_slots(1000) == 1100


def test_smaller_layers_share_the_places_of_larger_ones() -> None:
    layout = make_layout(60, tuple(GEMMA_4_31B), 262_144, 0, GEMMA_4_SIZES)
    full, *windowed = layout.groups
    assert (full.window, full.split, len(full.layers)) == (0, 2, 10)
    assert {(group.window, group.split) for group in windowed} == {(1024, 1)}
    assert len(layout.groups) <= MAX_GROUPS
    for group in layout.groups:
        assert len(group.layers) <= group.split * layout.layers_per_block
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(60))


def test_each_sub_block_has_tables_of_its_own() -> None:
    layout = make_layout(5, (0, 8, 0, 8, 0), 1000, 0, (2, 4, 2, 4, 2))
    assert layout.groups == (CacheGroup(0, (0, 2, 4), split=2), CacheGroup(8, (1, 3)))
    assert layout.splits == (2, 1)
    assert layout.group_of_layers() == [0, 2, 1, 2, 0]


def test_layers_that_no_place_fits_are_one_group() -> None:
    assert len(make_layout(2, (0, 8), 1000, 0, (2, 4)).groups) == 2
    assert len(make_layout(2, (0, 8), 1000, 0, (3, 4)).groups) == 1
    assert len(make_layout(2, (0, 8), 1000, 1.0, (2, 4)).groups) == 1, "a draft's layers have no sub-blocks"
