"""RecordingInjector: a fault injector that harms nothing."""

from __future__ import annotations

from quire.proto.faults import Fault


class RecordingInjector:
    """Records the faults."""

    def __init__(self) -> None:
        self.injected: list[tuple[str, int | None, Fault]] = []

    async def inject(self, replica_id: str, rank: int | None, fault: Fault) -> int:
        self.injected.append((replica_id, rank, fault))
        return 4711
