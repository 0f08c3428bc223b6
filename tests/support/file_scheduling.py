"""Distribution of the tests over the processes of pytest-xdist, which need not be installed otherwise."""

from __future__ import annotations

from run_order import scope_of
from xdist.scheduler.loadscope import LoadScopeScheduling


class FileScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each process one scope after the other, in the order of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)
