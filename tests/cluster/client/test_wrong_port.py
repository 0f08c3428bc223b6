"""A client of one protocol on the port of the other is told so."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest
from certificates import HAS_OPENSSL, make_authority, make_certificate
from deadlines import CALL_TIMEOUT_S

from quire import Client
from quire.cluster.cli.batch.http_caller import HttpCaller, Server
from quire.proto.errors import ConfigError, ServerUnreachable


class _Silent(BaseHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


def test_grpc_client_on_an_http_port_gets_a_hint() -> None:
    with HTTPServer(("127.0.0.1", 0), _Silent) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            target = f"127.0.0.1:{server.server_port}"
            with (
                Client(target, timeout_s=CALL_TIMEOUT_S) as client,
                pytest.raises(ServerUnreachable, match="an HTTP server listens there"),
            ):
                client.models()
        finally:
            server.shutdown()
            thread.join()


def test_batch_on_a_grpc_port_gets_a_hint() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        caller = HttpCaller(Server(f"http://127.0.0.1:{port}", retry_s=0.0), threading.Event())
        with caller, pytest.raises(ConfigError, match=r"does not speak HTTP/1\.1"):
            caller.post("/v1/completions", {})
    finally:
        server.stop(0)


@pytest.mark.skipif(not HAS_OPENSSL, reason="openssl makes the certificates")
def test_client_without_tls_on_a_port_with_tls_gets_a_hint(tmp_path: Path) -> None:
    pair = make_certificate(tmp_path, "server", make_authority(tmp_path, "authority"))
    credentials = grpc.ssl_server_credentials([(pair.key.read_bytes(), pair.cert.read_bytes())])
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        with (
            Client(f"127.0.0.1:{port}", timeout_s=CALL_TIMEOUT_S) as client,
            pytest.raises(ServerUnreachable, match="if it uses TLS"),
        ):
            client.models()
    finally:
        server.stop(0)
