"""BlockingCalls: results, errors and timeouts."""

from __future__ import annotations

import asyncio
import threading

import pytest

from quire.cluster.fleet.controller import interfaces
from quire.cluster.fleet.controller.interfaces import MAX_CALLS, BlockingCalls
from quire.proto.errors import ReplicaUnavailable


async def test_hanging_call_times_out_by_name_and_blocks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    blocking = BlockingCalls()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(interfaces, "CALL_TIMEOUT_S", 0.05)
            with pytest.raises(ReplicaUnavailable, match=r"looking at the nodes took more than 0.05 s"):
                await blocking.call("looking at the nodes", may_end.wait, 60)
        assert await blocking.call("counting", len, "abc") == 3
        with pytest.raises(ValueError, match="invalid literal"):
            await blocking.call("reading", int, "abc")
    finally:
        may_end.set()
        blocking.close()


async def test_removals_that_hang_block_no_other_call() -> None:
    may_end = threading.Event()
    blocking = BlockingCalls()
    try:
        removals = [
            asyncio.ensure_future(blocking.remove("removing a replica", may_end.wait, 60))
            for _ in range(2 * MAX_CALLS)
        ]
        assert await blocking.call("reading the nodes", len, "abc") == 3
        assert not any(removal.done() for removal in removals)
        may_end.set()
        assert all(await asyncio.gather(*removals))
    finally:
        may_end.set()
        blocking.close()
