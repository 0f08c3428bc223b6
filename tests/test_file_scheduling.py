"""FileScheduling with fake processes of pytest-xdist, of which some end during a test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("xdist")
from file_scheduling import FileScheduling

TESTS = [f"tests/test_{file}.py::test_{number}" for file, count in zip("abcd", (3, 1, 2, 1), strict=True)
         for number in range(count)]  # fmt: skip


class Node:
    """A process of pytest-xdist: it begins a test only once it knows the next one, or that it is to end after it."""

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.shutting_down = False
        self._assigned: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        assert not self.shutting_down, "a process that is to end gets no more tests"
        self._assigned += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    def next_test(self) -> int | None:
        """Return the test that runs next; None while the process waits."""
        if self._assigned and (len(self._assigned) > 1 or self.shutting_down):
            return self._assigned.pop(0)
        return None


class Run:
    """A run of TESTS by two processes, each of which is replaced if it ends during a test.

    Attributes:
        ran: the tests in the order of their start.
        crashed: those that ended their process.
    """

    def __init__(self) -> None:
        options: dict[str, Any] = {"tx": ["2*popen"]}
        config: Any = SimpleNamespace(
            getvalue=options.get, option=SimpleNamespace(loadscopereorder=False, **options)
        )
        self._scheduling = FileScheduling(config)
        self._nodes: list[Node] = []
        self.ran: list[str] = []
        self.crashed: list[str] = []
        for _ in range(2):
            self._scheduling.add_node_collection(self._add_node(), TESTS)
        self._scheduling.schedule()

    def run(self, crashing: set[str]) -> None:
        while runs := [(node, test) for node in self._nodes if (test := node.next_test()) is not None]:
            starting = []
            for node, index in runs:
                self.ran.append(TESTS[index])
                if TESTS[index] in crashing:
                    starting.append(self._replace(node))
                else:
                    self._scheduling.mark_test_complete(node, index)
            for node in starting:
                self._scheduling.add_node_collection(node, TESTS)
                self._scheduling.schedule()

    def _add_node(self) -> Node:
        node = Node(len(self._nodes))
        self._nodes.append(node)
        self._scheduling.add_node(node)
        return node

    def _replace(self, node: Node) -> Node:
        """Replace a process that has ended; the new one has yet to collect the tests."""
        crashed = self._scheduling.remove_node(node)
        assert crashed is not None
        self.crashed.append(crashed)
        self._nodes.remove(node)
        return self._add_node()


@pytest.mark.parametrize(
    "crashing",
    [[], *([test] for test in TESTS), TESTS[:3], TESTS[-2:], TESTS],
    ids=lambda tests: str(len(tests)),
)
def test_each_test_runs_once_although_processes_end(crashing: list[str]) -> None:
    run = Run()
    run.run(set(crashing))
    assert sorted(run.ran) == sorted(TESTS)
    assert sorted(run.crashed) == sorted(crashing)
