"""Times of ranks in the status: collectives apart from work, and ranks that are slower than their peers."""

from __future__ import annotations

import pytest

from quire.cluster.fleet.replica.channel_group import StageTimes, find_slow
from quire.proto.model.parallel_split import ParallelSplit
from quire.worker.comm.communicator import ReplaceableGroup, SingleRank


def times_of(
    compute_s: float, waited_s: float = 0.0, num_steps: int = 30, await_s: float = 0.0
) -> StageTimes:
    """Return the times of a rank, `waited_s` of whose forward passes are all-reduces."""
    times = StageTimes()
    for _ in range(num_steps):
        collective = {"all-reduce": waited_s} if waited_s else {}
        times.note({"forward": compute_s + waited_s, "await": await_s, **collective})
    return times


def test_waits_for_a_slow_rank_are_no_work() -> None:
    """All ranks' steps take equally long: the others wait in the all-reduce."""
    times = [times_of(0.002, 0.008), times_of(0.010), times_of(0.002, 0.008), times_of(0.003, 0.007)]
    slow = find_slow(times, ParallelSplit(tensor=4))
    assert slow == {1: pytest.approx(5.0)}
    assert times[1].describe(slow[1]).endswith(", 5.0 times as long as its peers")
    assert times[0].describe(0.0) == "computes 2.0 ms per step, all-reduce 8.0 ms"


def test_peers_are_the_ranks_of_a_stage() -> None:
    """The second stage has more to compute; its ranks are compared with each other."""
    split = ParallelSplit(pipeline=2, tensor=2, stage_sizes=(1, 5))
    times = [times_of(0.001), times_of(0.001), times_of(0.005), times_of(0.006)]
    assert not find_slow(times, split)
    assert find_slow([*times[:3], times_of(0.020)], split) == {3: pytest.approx(4.0)}


def test_stages_of_one_rank_are_compared_with_each_other() -> None:
    split = ParallelSplit(pipeline=3, stage_sizes=(1, 1, 1))
    times = [times_of(0.002, await_s=0.004), times_of(0.007), times_of(0.002)]
    assert list(find_slow(times, split)) == [1]
    assert times[0].describe(0.0) == "computes 2.0 ms per step, transfers 4.0 ms"


def test_few_steps_name_nobody() -> None:
    times = [times_of(0.001, num_steps=3), times_of(0.100, num_steps=3), StageTimes()]
    assert not find_slow(times, ParallelSplit(tensor=3))
    assert StageTimes().describe(0.0) == ""


def test_group_counts_the_seconds_of_its_collectives() -> None:
    import torch

    group = ReplaceableGroup(SingleRank())
    group.all_reduce(torch.ones(1))
    group.all_to_all(torch.ones(1, 1), [[1]]).wait()
    seconds = group.take_seconds()
    assert seconds.keys() == {"all-reduce", "all-to-all"}
    assert not group.take_seconds()
