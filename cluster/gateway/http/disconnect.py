"""unless_client_leaves: ends the work for a client as soon as the client closes its connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive


class ClientLeft(Exception):
    """The client closed its connection before the response was complete; nobody reads an answer."""


@asynccontextmanager
async def unless_client_leaves(receive: Receive) -> AsyncIterator[None]:
    """Cancel what runs in the block when the client leaves. The request's body must have been read.

    Raises:
        ClientLeft: the client has left.
    """
    work = asyncio.current_task()
    assert work is not None
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        work.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if has_left and work.uncancel() == 0:
            raise ClientLeft from None
        raise
    finally:
        watcher.cancel()
