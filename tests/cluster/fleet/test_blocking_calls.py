"""What blocks, beside the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from quire.cluster.fleet import blocking_calls
from quire.cluster.fleet.blocking_calls import BlockingCalls
from quire.proto.errors import ReplicaUnavailable


def test_a_call_that_hangs_is_named_and_the_next_one_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    async def scenario() -> None:
        made = BlockingCalls()
        try:
            with monkeypatch.context() as hasty:
                hasty.setattr(blocking_calls, "CALL_TIMEOUT_S", 0.05)
                with pytest.raises(ReplicaUnavailable, match=r"looking at the nodes took more than 0.05 s"):
                    await made.call("looking at the nodes", may_end.wait, 60)
            assert await made.call("counting", len, "abc") == 3
            with pytest.raises(ValueError, match="invalid literal"):
                await made.call("reading", int, "abc")
        finally:
            may_end.set()
            made.close()

    asyncio.run(scenario())
