"""The part of a plan that is for one rank with data-parallel attention."""

from __future__ import annotations

import numpy as np

from quire.proto.codec import NO_PAIRS
from quire.proto.step import StepPlan
from quire.worker.memory.kv_memory import KvPartition


def pairs(*values: tuple[int, int]) -> np.ndarray:
    return np.array(values, np.int32)


def test_rank_moves_its_own_blocks_by_its_own_numbers() -> None:
    partition = KvPartition(index=1, num_blocks=10, num_host_blocks=5)
    plan = StepPlan(
        1, 1, 0,
        copies=pairs((1, 2), (13, 14), (19, 11)),
        swap_out=pairs((9, 4), (12, 6), (21, 11)),
        swap_in=pairs((8, 15), (2, 3), (9, 16)),
    )  # fmt: skip
    own = partition.own_moves(plan)
    assert own.copies.tolist() == [[3, 4], [9, 1]]
    assert own.swap_out.tolist() == [[2, 1]]
    assert own.swap_in.tolist() == [[3, 5], [4, 6]]


def test_plan_without_moves_stays_as_it_is() -> None:
    plan = StepPlan(1, 1, 0)
    assert KvPartition(1, 10, 5).own_moves(plan) is plan
    others = KvPartition(0, 10, 5).own_moves(StepPlan(1, 1, 0, copies=pairs((13, 14))))
    assert others.copies.shape == NO_PAIRS.shape
