"""Fixtures `serve`, a gateway with a local replica, and `launcher`, a fleet's launcher without Ray.

The replica has the real step loop and a tiny model.

Gateways of these tests send an idle replica no canaries, which would count among a slow test's own requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from deadlines import PROGRAM_TIMEOUT_S
from fake_fleet import FakeLauncher
from local_server import Server, local_server

ServerFactory = Callable[..., AbstractAsyncContextManager[Server]]
LONGER_THAN_ANY_TEST_S = 3600.0


@pytest.fixture(autouse=True, scope="session")
def no_idle_canaries() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.cluster.gateway.routing.replica_pool.IDLE_CANARY_S", LONGER_THAN_ANY_TEST_S)
        yield


@pytest.fixture(autouse=True, scope="session")
def patient_grammar_workers() -> Iterator[None]:
    """A process that compiles grammars imports first, which took more than 60 s on two cores with a load of 30."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.cluster.text.sandbox.grammar_workers.TASK_TIMEOUT_S", PROGRAM_TIMEOUT_S)
        yield


@pytest.fixture
def serve(make_model: Callable[..., Path]) -> ServerFactory:
    """`serve(**options of local_server)`: an asynchronous context with a running Server.

    `model_dir` is the served model; default: a tiny Llama.
    """
    tiny = make_model("llama")

    def serving(*, model_dir: Path | None = None, **options: Any) -> AbstractAsyncContextManager[Server]:
        return local_server(tiny if model_dir is None else model_dir, **options)

    return serving


@pytest.fixture
def launcher() -> Iterator[FakeLauncher]:
    launcher = FakeLauncher()
    yield launcher
    launcher.close()
