"""PendingFills: blocks whose content counts only once the ranks are known to have written it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class PendingFills:
    """The blocks that steps fill, until a result shows that all ranks have filled them.

    The prefix caches list a block from the plan that fills it. If the ranks fail, the blocks of steps without such a
    result may be half written.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, list[int], list[int]]] = deque()  # (step, its blocks, its host blocks)

    def add(self, step_id: int, blocks: Iterable[int], host_blocks: Iterable[int]) -> None:
        """Record what step `step_id`, the newest, fills."""
        entry = step_id, list(blocks), list(host_blocks)
        if entry[1] or entry[2]:
            self._steps.append(entry)

    def confirm(self, step_id: int) -> None:
        """Forget the blocks of the steps up to `step_id`: all ranks have filled them."""
        while self._steps and self._steps[0][0] <= step_id:
            self._steps.popleft()

    def take(self) -> tuple[set[int], set[int]]:
        """Return and forget the blocks that may be half written, on the device and in host memory."""
        blocks = {block_id for _, filled, _ in self._steps for block_id in filled}
        host_blocks = {block_id for _, _, filled in self._steps for block_id in filled}
        self._steps.clear()
        return blocks, host_blocks
