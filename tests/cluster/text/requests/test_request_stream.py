"""UpdateQueue: when its reader is woken."""

from __future__ import annotations

import asyncio

import pytest

from quire.cluster.text.requests.sequence_update import SequenceUpdate, UpdateQueue
from quire.proto.errors import ReplicaUnavailable
from quire.proto.stream import Finish, FinishReason

NUM_TURNS = 10  # of the event loop, more than a reader that was woken needs


async def read(queue: UpdateQueue, taken: list[tuple[int, list[int]]]) -> None:
    async for index, update in queue:
        taken.append((index, list(update.token_ids)))


async def turn() -> None:
    for _ in range(NUM_TURNS):
        await asyncio.sleep(0)


@pytest.mark.parametrize("wakes_at_ends", [False, True])
async def test_reader_of_whole_outputs_is_woken_at_ends(*, wakes_at_ends: bool) -> None:
    queue, taken = UpdateQueue(2, wakes_at_ends=wakes_at_ends), list[tuple[int, list[int]]]()
    reader = asyncio.create_task(read(queue, taken))
    await turn()
    for token_id in (1, 2):
        queue.add(0, SequenceUpdate([token_id]))
        await turn()
    queue.add(1, SequenceUpdate([3], finish=Finish(1, FinishReason.LENGTH)))
    await turn()
    assert taken == ([(0, [1, 2]), (1, [3])] if wakes_at_ends else [(0, [1]), (0, [2]), (1, [3])])
    queue.add(0, SequenceUpdate([4], finish=Finish(0, FinishReason.LENGTH)))
    await asyncio.wait_for(reader, 60)
    assert taken[-1] == (0, [4])


async def test_failure_wakes_a_reader_of_whole_outputs() -> None:
    queue = UpdateQueue(1, wakes_at_ends=True)
    reader = asyncio.create_task(read(queue, []))
    await turn()
    queue.fail(ReplicaUnavailable("rank 0 was killed"))
    with pytest.raises(ReplicaUnavailable, match="rank 0 was killed"):
        await asyncio.wait_for(reader, 60)
