"""PageFeed: the frames of the operator's page, made once for all viewers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from ....proto.errors import Overloaded, QuireError
from ...client.wire.message_fields import from_message
from ...client.wire.status import FleetInfo
from ..admin.services import GatewayServices, server_version
from ..admin.status import block_map, latest_status
from .json_bodies import json_bytes

FRAME_S = 1.0
# Of a replica that hangs; the other figures of the frame wait as long.
BLOCK_MAP_TIMEOUT_S = 0.5
MAX_VIEWERS = 32


@dataclass(frozen=True, slots=True)
class _Frame:
    made_at: float
    event: bytes


class PageFeed:
    """Server-sent events with the state of the gateway. For one event loop.

    A frame is made only while somebody looks, and at most once per FRAME_S and replica, because a replica makes the
    map of its blocks on its step loop.
    """

    def __init__(self, services: GatewayServices) -> None:
        self._services = services
        self._frames: dict[str, _Frame] = {}  # replica whose blocks are shown |-> latest frame
        self._making = asyncio.Lock()
        self._num_viewers = 0

    def check_capacity(self) -> None:
        """Raises Overloaded if MAX_VIEWERS look already."""
        if self._num_viewers >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} pages are open already; close one")

    async def events(self, replica_id: str) -> AsyncIterator[bytes]:
        """Yield an event per FRAME_S until the server stops.

        Args:
            replica_id: replica whose blocks are shown; empty for none.
        """
        closing = self._services.closing
        self._num_viewers += 1
        try:
            while not closing.is_set():
                yield await self._event(replica_id)
                with suppress(TimeoutError):
                    await asyncio.wait_for(closing.wait(), FRAME_S)
        finally:
            self._num_viewers -= 1

    async def _event(self, replica_id: str) -> bytes:
        async with self._making:
            frame = self._frames.get(replica_id)
            if frame is None or time.monotonic() - frame.made_at >= FRAME_S / 2:
                self._forget_old_frames()
                content = json_bytes(await self._content(replica_id))
                frame = _Frame(time.monotonic(), b"data: %b\n\n" % content)
                self._frames[replica_id] = frame
            return frame.event

    def _forget_old_frames(self) -> None:
        """Bounds the frames, whose keys are what callers sent."""
        oldest = time.monotonic() - 2 * FRAME_S
        self._frames = {key: frame for key, frame in self._frames.items() if frame.made_at > oldest}

    async def _content(self, replica_id: str) -> dict[str, Any]:
        fleet = from_message(FleetInfo, await latest_status(self._services))
        blocks = await self._blocks(replica_id) if replica_id else None
        return {"version": server_version(), "fleet": asdict(fleet), "blocks": blocks}

    async def _blocks(self, replica_id: str) -> dict[str, Any]:
        """Return the map of a replica's blocks, or why there is none."""
        try:
            blocks = await block_map(self._services, replica_id, BLOCK_MAP_TIMEOUT_S)
        except QuireError as error:
            return {"problem": str(error)}
        return {
            "num_blocks": blocks.num_blocks,
            "stride": blocks.stride,
            "states": "".join(map(str, blocks.states)),
            "rows": blocks.rows.tolist(),
            "sequences": [asdict(sequence) for sequence in blocks.sequences],
        }
