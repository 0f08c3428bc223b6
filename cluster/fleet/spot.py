"""Spot notices: a cloud tells a machine that it is about to take it back, at an address that only the machine sees.

- AWS, IMDSv2: ``spot/instance-action`` is there once the machine is to go, two minutes before.
- Google Cloud: ``instance/preempted`` turns TRUE, 30 seconds before.
- Azure: Scheduled Events list a ``Preempt``, 30 seconds before.
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
# What a notice without a time is taken to leave.
NOTICE_S = 30.0
INTERVAL_S = 5.0


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
    except (URLError, HTTPException, OSError, ValueError):
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


# cloud |-> how it gives notice.
NOTICES: Mapping[str, Notice] = {"aws": aws_notice, "gcp": gcp_notice, "azure": azure_notice}


def wait_for_notice(
    cloud: str,
    ask: Fetch = fetch,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Seconds that this machine has left, as soon as its cloud says so; looks at intervals."""
    while (left_s := NOTICES[cloud](ask, clock())) is None:
        sleep(INTERVAL_S)
    return left_s
