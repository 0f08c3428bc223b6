"""Deadlines over HTTP: the header X-Request-Timeout."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from local_server import ThreadedServer

ENDLESS: dict[str, Any] = {"model": "tiny", "prompt": "It was", "max_tokens": 400, "ignore_eos": True}


def post(http: httpx.Client, timeout: str, **body: Any) -> httpx.Response:
    return http.post("/v1/completions", json=ENDLESS | body, headers={"x-request-timeout": timeout})


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", ""])
def test_value_that_is_no_positive_number_is_refused(http: httpx.Client, value: str) -> None:
    response = post(http, value)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("X-Request-Timeout: is ")


def test_request_ends_at_its_deadline(http: httpx.Client) -> None:
    response = post(http, "0.01")
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_expired")


@pytest.mark.parametrize("is_stream", [False, True])
def test_request_ends_although_its_replica_does_not_answer(
    http: httpx.Client, server: ThreadedServer, is_stream: bool
) -> None:
    server.server.brake.hold()
    try:
        response = post(http, "0.2", stream=is_stream)
    finally:
        server.server.brake.release()
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_expired")


def test_request_with_time_enough_completes(http: httpx.Client) -> None:
    response = post(http, "600", max_tokens=5)
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 5
