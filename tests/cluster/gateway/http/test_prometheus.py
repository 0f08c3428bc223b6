"""A real Prometheus scrapes a server, evaluates the alert rules and answers the dashboard's queries."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import yaml
from local_server import ThreadedServer

from quire import Client, SamplingParams
from quire.cluster.gateway.metrics.dashboard import dashboard
from quire.cluster.gateway.metrics.generate import generated_files

DEADLINE_S = 60.0
# Panels of what a server with one replica on a CPU, without errors and without host memory, does not have.
EMPTY_PANELS = {
    "Errors",
    "Blocks of host memory",
    "Why that many",
    "Replicas by state",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: prometheus)"
    ),
]


@pytest.fixture(scope="module")
def query(server: ThreadedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """A function that calls Prometheus' HTTP API."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "alerts.yaml").write_text(generated_files()["examples/monitoring/alerts.yaml"])
    target = server.url.removeprefix("http://")
    config = {
        "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "200ms"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [{"job_name": "quire", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = ["--config.file=prometheus.yaml", "--storage.tsdb.path=data", f"--web.listen-address={address}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["prometheus", *flags], cwd=folder, stderr=log)
    try:
        yield lambda call: json.load(
            urllib.request.urlopen(f"http://{address}/api/v1/{call}", timeout=DEADLINE_S)
        )
    finally:
        process.kill()
        process.wait()


def eventually(condition: Callable[[], Any]) -> Any:
    """Return the condition's first true value."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            if value := condition():
                return value
        except OSError:  # it does not listen yet
            pass
        time.sleep(0.1)
    raise AssertionError(f"not within {DEADLINE_S:g} s")


def value(query: Callable[[str], Any], expression: str) -> list[str]:
    found = query("query?" + urllib.parse.urlencode({"query": expression}))["data"]["result"]
    return [each["value"][1] for each in found]


def test_prometheus_reads_every_panel_and_rule(server: ThreadedServer, query: Callable[[str], Any]) -> None:
    eventually(lambda: value(query, "vllm:generation_tokens_total") == ["0"])
    with Client(server.server.target) as client:
        for _ in range(2):
            client.generate("The quick brown fox", SamplingParams(max_tokens=12, ignore_eos=True))
    eventually(lambda: value(query, "vllm:generation_tokens_total") == ["24"])
    assert value(query, "vllm:num_requests_waiting") == ["0"]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$__rate_interval", "1m")
            expression = re.sub(r"\$(model_name|engine)", ".*", expression)
            if panel["title"] not in EMPTY_PANELS and target["legendFormat"] != "target":
                eventually(partial(value, query, expression))
    rules = [rule for group in query("rules")["data"]["groups"] for rule in group["rules"]]
    assert rules
    assert {rule["health"] for rule in rules} == {"ok"}, rules
