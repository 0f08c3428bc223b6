"""The time that a call spends in its gateway counts for its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.cluster.gateway.generation import generation as module
from quire.cluster.gateway.generation.generation import GenerationCall, GenerationService
from quire.cluster.text.requests.request import Request
from quire.proto.errors import DeadlineExpired, Overloaded, QuireError
from quire.proto.sampling import SamplingParams


class Model:
    """A model whose checks take `check_s` of a clock, and whose replicas refuse every request."""

    name = "tiny"

    def __init__(self, check_s: float) -> None:
        self.now = 1000.0
        self._check_s = check_s
        self.submitted: list[Request] = []
        self.checker = self.pool = self
        self.adapters = SimpleNamespace(find=lambda name: None)

    def check(self, prompt: str, sampling: SamplingParams, *, timeout_s: float | None, **_: Any) -> Request:
        self.now += self._check_s
        return Request("r", np.arange(1, 4, dtype=np.int32), sampling, timeout_s=timeout_s)

    def submit(self, request: Request, *_: Any) -> Any:
        self.submitted.append(request)
        raise Overloaded("full")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Model, float | None], QuireError]:
    """`run(model, timeout_s)` returns the error of a call."""

    def run(model: Model, timeout_s: float | None) -> QuireError:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: model.now))
        models: Any = SimpleNamespace(find=lambda name: model)

        async def call() -> None:
            service = GenerationService(models)
            async with service.run(GenerationCall("It was", SamplingParams(), timeout_s=timeout_s)):
                raise AssertionError("the request was accepted")

        with pytest.raises(QuireError) as caught:
            asyncio.run(call())
        return caught.value

    return run


def test_replica_gets_the_time_that_is_left_after_the_checks(run: Any) -> None:
    model = Model(check_s=2.0)
    assert isinstance(run(model, 10.0), Overloaded)
    assert [request.timeout_s for request in model.submitted] == [8.0]


def test_request_without_a_deadline_has_none(run: Any) -> None:
    model = Model(check_s=2.0)
    assert isinstance(run(model, None), Overloaded)
    assert [request.timeout_s for request in model.submitted] == [None]


def test_request_whose_checks_took_all_its_time_is_not_submitted(run: Any) -> None:
    model = Model(check_s=2.0)
    error = run(model, 1.5)
    assert isinstance(error, DeadlineExpired)
    assert str(error) == "request r: checking it took 2 s, and its deadline was in 1.5 s"
    assert model.submitted == []
