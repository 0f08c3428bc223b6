"""Distribution of the tests over the processes of pytest-xdist, which need not be installed otherwise."""

from __future__ import annotations

from typing import Any

from run_order import scope_of
from xdist.scheduler.loadscope import LoadScopeScheduling


class FileScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each process one scope after the other, in the order of the tests.

    After the end of a process, another one continues with the test after the one that ended it.
    """

    def remove_node(self, node: Any) -> str | None:
        """Remove a process; return the test that ended it, which is not run again: it could end the next process too.

        Returns None if the process had no test left.
        """
        scopes = self.assigned_work.pop(node)
        crashed: str | None = next(
            (test for tests in scopes.values() for test, is_done in tests.items() if not is_done), None
        )
        for scope, tests in scopes.items():
            if crashed in tests:
                tests[crashed] = True
            if not all(tests.values()):
                self.workqueue[scope] = tests
        if crashed is not None:
            for other in self.assigned_work:
                self._reschedule(other)
        return crashed

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def _reschedule(self, node: Any) -> None:
        """Assign work; a process begins its last test only once it has another one, or is to end after it.

        A process that still collects the tests gets none: `schedule` is called again when it has.
        """
        if node not in self.registered_collections:
            return
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)
