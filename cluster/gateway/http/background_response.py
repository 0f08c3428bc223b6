"""BackgroundResponse: a response that is made whether or not a client waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from ....proto.errors import ProtocolError, QuireError
from ..generation.generation import Generation
from .errors import UNEXPECTED
from .event_log import EventLog
from .response_stream import ResponseBuilder

_log = logging.getLogger(__name__)


class BackgroundResponse:
    """One response and the task that makes it. For one event loop.

    Args:
        builder: of the response, without events.
        cleanup: left when the response has ended.
        on_end: called then.

    Attributes:
        events: of its stream.
    """

    def __init__(
        self,
        builder: ResponseBuilder,
        generation: Generation,
        cleanup: AsyncExitStack,
        on_end: Callable[[BackgroundResponse], None],
    ) -> None:
        self.events = EventLog()
        self._builder = builder
        self._on_end = on_end
        self.events.add(builder.queued())
        self._task = asyncio.create_task(self._run(generation, cleanup))

    @property
    def response(self) -> dict[str, Any]:
        """The response as far as it is made."""
        return self._builder.response

    async def cancel(self) -> None:
        """End the response and its request; returns when it has ended."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self, generation: Generation, cleanup: AsyncExitStack) -> None:
        try:
            async with cleanup:
                async for event in generation.events:
                    self.events.add(self._builder.event(event))
        except asyncio.CancelledError:
            self._builder.cancel()
        except QuireError as error:
            self.events.add(self._builder.failed(error))
        except Exception:
            _log.exception("a response failed unexpectedly")
            self.events.add(self._builder.failed(ProtocolError(UNEXPECTED)))
        finally:
            self.events.end()
            self._on_end(self)
