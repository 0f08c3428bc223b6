"""Spot notices: a cloud tells a machine that it is about to take it back, at an address that only the machine sees.

- AWS, IMDSv2: ``spot/instance-action`` is there once the machine is to go, two minutes before.
- Google Cloud: ``instance/preempted`` turns TRUE, 30 seconds before.
- Azure: Scheduled Events list a ``Preempt``, 30 seconds before.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Protocol
from urllib import request
from urllib.error import URLError

_METADATA = "http://169.254.169.254"
_TIMEOUT_S = 1.0
_MAX_BYTES = 1 << 16
# What a notice without a time is taken to leave.
NOTICE_S = 30.0

_log = logging.getLogger(__name__)


class Fetch(Protocol):
    """Asks the metadata address."""

    def __call__(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
        """The answer's text; None where there is no such thing, or nobody answers."""
        ...


Notice = Callable[[Fetch, float], float | None]


def fetch(path: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """See Fetch. Never by a proxy: the address is the machine's own."""
    opener = request.build_opener(request.ProxyHandler({}))
    asked = request.Request(_METADATA + path, headers=dict(headers), method=method)
    try:
        with opener.open(asked, timeout=_TIMEOUT_S) as answer:
            return str(answer.read(_MAX_BYTES).decode(errors="replace"))
    except (URLError, OSError, ValueError):
        return None


def aws_notice(ask: Fetch, now: float) -> float | None:
    """Seconds that an AWS spot instance has left; None: there is no notice."""
    token = ask("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    if token is None:
        return None
    text = ask("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(json.loads(text)["time"].replace("Z", "+00:00")).timestamp()
    except (ValueError, TypeError, KeyError, AttributeError):
        return NOTICE_S
    return max(0.0, at - now)


def gcp_notice(ask: Fetch, now: float) -> float | None:
    """Seconds that a Google Cloud spot machine has left; None: there is no notice."""
    text = ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return NOTICE_S if text is not None and text.strip().upper() == "TRUE" else None


def azure_notice(ask: Fetch, now: float) -> float | None:
    """Seconds that an Azure spot machine has left; None: there is no notice."""
    text = ask("/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
    try:
        events = json.loads(text or "{}").get("Events", [])
        return NOTICE_S if any(event.get("EventType") == "Preempt" for event in events) else None
    except (ValueError, AttributeError, TypeError):
        return None


# Who answers tells which cloud it is.
_PROBES: Mapping[str, tuple[Notice, str, Mapping[str, str], str]] = {
    "aws": (aws_notice, "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT"),
    "gcp": (gcp_notice, "/computeMetadata/v1/instance/id", {"Metadata-Flavor": "Google"}, "GET"),
    "azure": (azure_notice, "/metadata/instance/compute/vmId?api-version=2021-02-01&format=text",
              {"Metadata": "true"}, "GET"),
}  # fmt: skip


def find_cloud(ask: Fetch = fetch) -> Notice | None:
    """How the cloud that this machine runs in gives notice; None: it is in none of those that are known."""
    for name, (notice, path, headers, method) in _PROBES.items():
        if ask(path, headers, method) is not None:
            _log.info("spot notices are those of %s", name)
            return notice
    return None


class SpotWatcher:
    """A machine's watcher, made an actor of that machine by the controller.

    Args:
        interval_s: between two looks.
    """

    def __init__(
        self, interval_s: float = 5.0, ask: Fetch = fetch, clock: Callable[[], float] = time.time
    ) -> None:
        self._interval_s = interval_s
        self._ask = ask
        self._clock = clock

    def wait_for_notice(self) -> float | None:
        """Seconds that the machine has left, once there is a notice; None at once where none can come."""
        notice = find_cloud(self._ask)
        if notice is None:
            return None
        while (left_s := notice(self._ask, self._clock())) is None:
            time.sleep(self._interval_s)
        return left_s
