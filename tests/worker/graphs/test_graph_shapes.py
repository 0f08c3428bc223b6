"""Shapes of recorded steps, and the choice of one for a step."""

from __future__ import annotations

import pytest

from quire.worker.graphs.graph_shapes import (
    GraphShape,
    adapted_shapes,
    decode_shapes,
    find_shape,
    mixed_shapes,
)


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_tokens", "sizes"),
    [
        (1, 1, [1]),
        (1, 17, [1, 2, 4, 8, 16, 17]),
        (3, 3, [1, 2, 3]),
        (64, 64, [1, 2, 4, 8, 16, 24, 32, 48, 64]),
        (100, 116, [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100, 116]),
    ],
)
def test_decode_shapes_are_powers_and_midpoints(
    max_num_seqs: int, max_num_tokens: int, sizes: list[int]
) -> None:
    assert decode_shapes(max_num_seqs, max_num_tokens) == [GraphShape(size) for size in sizes]


def test_adapted_shapes_are_those_of_decodes() -> None:
    assert [shape.num_decodes for shape in adapted_shapes(6, 6, 1)] == [1, 2, 4, 6]
    assert not set(adapted_shapes(6, 6, 1)) & set(decode_shapes(6, 6))
    assert adapted_shapes(6, 6, 0) == []


def test_mixed_shapes_stay_within_the_limits_of_a_step() -> None:
    assert [(shape.num_decodes, shape.num_chunk_tokens) for shape in mixed_shapes(20, 100)] == [
        (16, 64),
        (20, 64),
        (16, 100),
        (20, 100),
    ]
    assert len(mixed_shapes(1024, 8192)) == 9
    assert {shape.num_chunk_tokens for shape in mixed_shapes(64, 16)} == {16}


@pytest.mark.parametrize(
    ("step", "found"),
    [
        ((0, 1, 1), (16, 64)),
        ((16, 8, 64), (16, 64)),
        ((17, 1, 1), (64, 64)),
        ((3, 1, 65), (16, 128)),
        ((1, 9, 9), None),  # too many chunks
        ((65, 1, 100), None),  # 384 tokens instead of 165
        ((250, 1, 120), (256, 128)),
        ((60, 2, 200), (64, 256)),
        ((100, 1, 257), None),
        ((257, 1, 10), None),
    ],
)
def test_find_shape_limits_padding(step: tuple[int, int, int], found: tuple[int, int] | None) -> None:
    shape = find_shape(mixed_shapes(1024, 8192), *step)
    assert (None if shape is None else (shape.num_decodes, shape.num_chunk_tokens)) == found


def test_find_shape_of_decodes_is_the_smallest() -> None:
    assert find_shape(decode_shapes(64, 64), 17, 0, 0) == GraphShape(24)
    assert find_shape(decode_shapes(64, 64), 65, 0, 0) is None
