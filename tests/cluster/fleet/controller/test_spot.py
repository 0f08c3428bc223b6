"""Spot notices at the metadata addresses of clouds."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping

import pytest

from quire.cluster.fleet.controller import spot
from quire.cluster.fleet.controller.spot import INTERVAL_S, NOTICE_S, NOTICES, wait_for_notice

NOW = 1_700_000_000.0


class Metadata:
    """Fake metadata address: path |-> response; AWS requires a token."""

    def __init__(self, responses: Mapping[str, str], token: str | None = None) -> None:
        self.responses = dict(responses)
        self._token = token

    def __call__(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
        if path == "/latest/api/token":
            return self._token if method == "PUT" else None
        if self._token is not None and headers.get("X-aws-ec2-metadata-token") != self._token:
            return None
        if path.startswith("/computeMetadata") and headers.get("Metadata-Flavor") != "Google":
            return None
        return self.responses.get(path)


AWS = "/latest/meta-data/spot/instance-action"
GCP = "/computeMetadata/v1/instance/preempted"
AZURE = "/metadata/scheduledevents?api-version=2020-07-01"


@pytest.mark.parametrize(
    ("cloud", "metadata", "left_s"),
    [
        ("aws", Metadata({}, "secret"), None),
        ("aws", Metadata({AWS: '{"action": "terminate", "time": "2023-11-14T22:15:20Z"}'}, "secret"), 120.0),
        ("aws", Metadata({AWS: '{"action": "stop", "time": "2023-11-14T22:13:00Z"}'}, "secret"), 0.0),
        ("aws", Metadata({AWS: "soon"}, "secret"), NOTICE_S),
        ("aws", Metadata({AWS: "[]"}, "secret"), NOTICE_S),
        ("aws", Metadata({AWS: "{}"}), None),
        ("gcp", Metadata({GCP: "FALSE"}), None),
        ("gcp", Metadata({GCP: "TRUE\n"}), NOTICE_S),
        ("gcp", Metadata({}), None),
        ("azure", Metadata({AZURE: '{"DocumentIncarnation": 1, "Events": []}'}), None),
        ("azure", Metadata({AZURE: '{"Events": [{"EventType": "Reboot"}]}'}), None),
        (
            "azure",
            Metadata({AZURE: '{"Events": [{"EventType": "Reboot"}, {"EventType": "Preempt"}]}'}),
            NOTICE_S,
        ),
        ("azure", Metadata({AZURE: "<html>"}), None),
        ("azure", Metadata({AZURE: '{"Events": [1]}'}), None),
    ],
)
def test_notices_are_parsed(cloud: str, metadata: Metadata, left_s: float | None) -> None:
    assert NOTICES[cloud](metadata, NOW) == left_s


def test_watcher_polls_until_there_is_a_notice() -> None:
    metadata, slept = Metadata({GCP: "FALSE"}), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            metadata.responses[GCP] = "TRUE"

    assert wait_for_notice("gcp", metadata, lambda: NOW, sleep) == NOTICE_S
    assert slept == [INTERVAL_S] * 3


def test_invalid_http_response_is_no_notice() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def respond() -> None:
            connection, _ = server.accept()
            connection.recv(1 << 16)
            connection.sendall(b"not HTTP\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=respond)
        thread.start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert spot.fetch("/", {}, address=address, timeout_s=60.0) is None
        thread.join(60)
