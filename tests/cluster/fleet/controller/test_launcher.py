"""RayLauncher tells each launch which replicas began to load the same model before it."""

from __future__ import annotations

from quire.cluster.fleet.controller import controller
from quire.cluster.fleet.controller.controller import RayLauncher
from quire.proto.transport.network import CurveKeys


def test_replicas_that_began_to_load_a_model_are_named_the_latest_first() -> None:
    launcher = RayLauncher(CurveKeys.generate(), "space", None, None)
    assert launcher._begin_load("/models/a", "one") == []
    assert launcher._begin_load("/models/b", "other") == []
    assert launcher._begin_load("/models/a", "two") == ["one"]
    assert launcher._begin_load("/models/a", "three") == ["two", "one"]
    for number in range(2 * controller._NUM_KNOWN_LOADS):
        launcher._begin_load("/models/b", f"{number}")
    assert len(launcher._begin_load("/models/b", "last")) == controller._NUM_KNOWN_LOADS
