"""The container files: hadolint accepts the Dockerfile, and it keeps what docs/container.md promises."""

from __future__ import annotations

import re
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from certificates import HAS_OPENSSL, make_authority, make_certificate

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "cluster" / "cli" / "provision" / "container"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())


def stages() -> dict[str, list[str]]:
    """Return the name |-> instructions of each stage."""
    found: dict[str, list[str]] = {}
    joined = re.sub(
        r"\\\n\s*", "", "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#"))
    )
    for line in filter(None, joined.splitlines()):
        if start := re.fullmatch(r"FROM (\S+) AS (\w+)", line):
            found[start[2]] = list(found.get(start[1], []))
        elif found:
            list(found.values())[-1].append(line)
    return found


def test_hadolint_has_no_complaint(tools: Path) -> None:
    done = subprocess.run(
        [tools / "hadolint", "--no-color", FOLDER / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_image_of_nodes_keeps_the_user_and_the_entry_point_of_ray() -> None:
    """`ray up` starts `bash` in it, and copies files with the image's rsync."""
    stage = stages()["node"]
    assert not any(line.startswith(("USER", "ENTRYPOINT", "CMD", "ENV")) for line in stage)
    assert any("[otel,triton,aws,gcp,azure]" in line for line in stage)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_image_runs_as_a_user_with_a_health_check_and_a_volume(target: str) -> None:
    stage = stages()[target]
    user = [line for line in stage if line.startswith("USER ")]
    assert user[-1:] == ["USER 10001:10001"]
    assert not any(line.startswith("RUN") for line in stage[stage.index(user[-1]) :])
    assert 'VOLUME ["/var/cache/quire"]' in stage
    assert any(line.startswith("HEALTHCHECK") and "quire-healthcheck" in line for line in stage)
    assert 'ENTRYPOINT ["tini", "--", "quire"]' in stage
    assert any("/usr/share/sbom/quire.cdx.json" in line for line in stage)
    labels = next(line for line in stage if line.startswith("LABEL"))
    for label in ("title", "licenses", "source", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in labels


def test_copied_files_exist_and_pass_the_ignore_file() -> None:
    copied = [line.split()[1:-1] for line in stages()["wheel"] if line.startswith("COPY")]
    names = {name for each in copied for name in each}
    missing = [name for name in names if not (ROOT / name).exists()]
    assert missing == []
    kept = set(re.findall(r"^!(.*)$", (FOLDER / "Dockerfile.dockerignore").read_text(), re.MULTILINE))
    assert names == kept


def test_variables_of_the_image_are_read_by_quire() -> None:
    for name in ("QUIRE_CACHE_DIR",):
        assert name in DOCKERFILE
        assert name in (ROOT / "kernels" / "native" / "build.py").read_text()


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_service_has_no_rights_and_publishes_on_this_machine_only(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert ":" in service["image"]
    assert not service["image"].endswith(":latest")


def test_files_that_compose_mounts_exist() -> None:
    for service in COMPOSE["services"].values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert (FOLDER / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], (
                mount
            )
    build = COMPOSE["services"]["quire"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).resolve() == FOLDER / "Dockerfile"
    assert build["target"] in stages()


def test_prometheus_scrapes_the_service_and_reads_its_rules() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["quire:8000"]}]
    mounts = {mount.split(":")[1] for mount in COMPOSE["services"]["prometheus"]["volumes"]}
    assert {f"/etc/prometheus/{name}" for name in config["rule_files"]} <= mounts


@contextmanager
def http_server(status: int, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def health(port: int, variable: str = "QUIRE_HTTP") -> int:
    value = f"0.0.0.0:{port}" if variable == "QUIRE_HTTP" else str(port)
    command = [sys.executable, "-I", str(FOLDER / "healthcheck.py")]
    return subprocess.run(
        command, env={variable: value}, capture_output=True, timeout=60, check=False
    ).returncode


def test_health_check_succeeds_on_200_only() -> None:
    with http_server(200) as port:
        assert health(port) == 0
        assert health(port, "QUIRE_HEALTH_PORT") == 0
    with http_server(503) as port:
        assert health(port) == 1
    assert health(port) == 1


@pytest.mark.skipif(not HAS_OPENSSL, reason="needs openssl")
def test_health_check_asks_a_server_with_tls(tmp_path: Path) -> None:
    pair = make_certificate(tmp_path, "server", make_authority(tmp_path, "authority"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    with http_server(200, context) as port:
        assert health(port) == 0
