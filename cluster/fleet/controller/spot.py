"""Spot notices: a cloud's announcement that it takes a machine back, read from the machine's metadata address.

- AWS, IMDSv2: ``spot/instance-action`` exists from two minutes before the end.
- Google Cloud: ``instance/preempted`` turns TRUE 30 seconds before.
- Azure: Scheduled Events list a ``Preempt`` 30 seconds before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from http.client import HTTPException
from typing import Protocol
from urllib import request
from urllib.error import URLError

_METADATA = "http://169.254.169.254"
_TIMEOUT_S = 1.0
_MAX_BYTES = 1 << 16
# Time left that is assumed for a notice without a time.
NOTICE_S = 30.0
INTERVAL_S = 5.0


class Fetch(Protocol):
    """Reads a path of the metadata address."""

    def __call__(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
        """Return the response's text, or None if there is none."""
        ...


Notice = Callable[[Fetch, float], float | None]


def fetch(
    path: str,
    headers: Mapping[str, str],
    method: str = "GET",
    address: str = _METADATA,
    timeout_s: float = _TIMEOUT_S,
) -> str | None:
    """See Fetch. Never uses a proxy: the address is the machine's own."""
    opener = request.build_opener(request.ProxyHandler({}))
    query = request.Request(address + path, headers=dict(headers), method=method)
    try:
        with opener.open(query, timeout=timeout_s) as response:
            return str(response.read(_MAX_BYTES).decode(errors="replace"))
    except (URLError, HTTPException, OSError, ValueError):
        return None


def aws_notice(fetch: Fetch, now: float) -> float | None:
    """Return the seconds that an AWS spot instance has left, or None if there is no notice."""
    token = fetch("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    if token is None:
        return None
    text = fetch("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(json.loads(text)["time"].replace("Z", "+00:00")).timestamp()
    except (ValueError, TypeError, KeyError, AttributeError):
        return NOTICE_S
    return max(0.0, at - now)


def gcp_notice(fetch: Fetch, now: float) -> float | None:
    """Return the seconds that a Google Cloud spot machine has left, or None if there is no notice."""
    text = fetch("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return NOTICE_S if text is not None and text.strip().upper() == "TRUE" else None


def azure_notice(fetch: Fetch, now: float) -> float | None:
    """Return the seconds that an Azure spot machine has left, or None if there is no notice."""
    text = fetch("/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
    try:
        events = json.loads(text or "{}").get("Events", [])
        return NOTICE_S if any(event.get("EventType") == "Preempt" for event in events) else None
    except (ValueError, AttributeError, TypeError):
        return None


# cloud |-> the function that reads its notice
NOTICES: Mapping[str, Notice] = {"aws": aws_notice, "gcp": gcp_notice, "azure": azure_notice}


def wait_for_notice(
    cloud: str,
    fetch: Fetch = fetch,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Poll for this machine's notice every INTERVAL_S; return the seconds that the machine has left."""
    while (left_s := NOTICES[cloud](fetch, clock())) is None:
        sleep(INTERVAL_S)
    return left_s
