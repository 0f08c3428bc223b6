"""TLS of the gRPC and the HTTP server: certificates of both sides, and new ones without a restart."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from dataclasses import dataclass
from pathlib import Path

import pytest
from certificates import HAS_OPENSSL, Pair, make_authority, make_certificate
from serving import PROMPT, ServerFactory

from quire.cluster.client.client import AsyncClient
from quire.cluster.config.server_options import ServerOptions
from quire.cluster.gateway.access.security import Security, load_certificate
from quire.cluster.os_utils.watched_file import WatchedFiles, constant
from quire.proto.errors import ConfigError, ReplicaUnavailable
from quire.proto.sampling import SamplingParams

pytestmark = pytest.mark.skipif(not HAS_OPENSSL, reason="openssl makes the certificates")

GREEDY = SamplingParams(temperature=0.0, max_tokens=2)


@dataclass(frozen=True)
class Certificates:
    """A server's certificate and its successor, a client's, and one that another authority signed."""

    authority: Pair
    server: Pair
    successor: Pair
    client: Pair
    stranger: Pair


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    authority, other = make_authority(folder, "authority"), make_authority(folder, "other")
    server, successor, client = (
        make_certificate(folder, name, authority) for name in ("server", "successor", "client")
    )
    return Certificates(authority, server, successor, client, make_certificate(folder, "stranger", other))


async def subject(url: str, authority: Path, cert: Path | None = None) -> str:
    """Return the name in the server's certificate, after a request over HTTP that it answers."""
    context = ssl.create_default_context(cafile=str(authority))
    if cert is not None:
        context.load_cert_chain(cert)
    host, port = url.removeprefix("https://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        names = writer.get_extra_info("peercert")["subject"]
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        return str(dict(entry for names in names for entry in names)["commonName"])
    finally:
        writer.close()


async def test_calls_work_over_tls(serve: ServerFactory, certificates: Certificates) -> None:
    options = ServerOptions(tls_cert=certificates.server.cert, tls_key=certificates.server.key)
    async with serve(security=Security.load(options), http=True) as server:
        async with AsyncClient(server.target, tls_ca=certificates.authority.cert) as client:
            assert (await client.generate(PROMPT, GREEDY)).outputs[0].token_ids
        async with AsyncClient(server.target) as client:
            with pytest.raises(ReplicaUnavailable):
                await client.generate(PROMPT, GREEDY, resumable=False)  # is not sent again
        assert await subject(server.url, certificates.authority.cert) == "server"


async def test_client_without_a_certificate_of_the_authority_cannot_connect(
    serve: ServerFactory, certificates: Certificates
) -> None:
    options = ServerOptions(
        tls_cert=certificates.server.cert,
        tls_key=certificates.server.key,
        tls_client_ca=certificates.authority.cert,
    )
    ca = certificates.authority.cert
    async with serve(security=Security.load(options), http=True) as server:
        async with AsyncClient(server.target, tls_ca=ca, tls_cert=certificates.client.both) as client:
            assert (await client.generate(PROMPT, GREEDY)).outputs[0].token_ids
        assert await subject(server.url, ca, certificates.client.both) == "server"
        for cert in (None, certificates.stranger.both):
            async with AsyncClient(server.target, tls_ca=ca, tls_cert=cert) as client:
                with pytest.raises(ReplicaUnavailable):
                    await client.generate(PROMPT, GREEDY, resumable=False)
            # TLS 1.3: the client's side of the handshake ends before the server has refused its certificate.
            with pytest.raises((ssl.SSLError, ConnectionError, AssertionError)):
                await subject(server.url, ca, cert)


async def test_changed_certificate_is_used_by_the_next_handshake(
    serve: ServerFactory, certificates: Certificates, tmp_path: Path
) -> None:
    cert, key, now = tmp_path / "cert.pem", tmp_path / "key.pem", 0.0
    shutil.copy(certificates.server.cert, cert)
    shutil.copy(certificates.server.key, key)
    ca = certificates.authority.cert
    watched = WatchedFiles(
        [cert, key], lambda: load_certificate(cert, key), "the certificate", clock=lambda: now
    )
    async with serve(security=Security(certificate=watched), http=True) as server:
        async with AsyncClient(server.target, tls_ca=ca) as client:
            assert (await client.generate(PROMPT, GREEDY)).outputs[0].token_ids
        assert await subject(server.url, ca) == "server"
        assert await grpc_subject(server.target, ca) == "server"
        shutil.copy(certificates.successor.cert, cert)
        now += 1.0
        assert await subject(server.url, ca) == "server"  # the key is still the old one
        shutil.copy(certificates.successor.key, key)
        now += 1.0
        assert await subject(server.url, ca) == "successor"
        assert await grpc_subject(server.target, ca) == "successor"
        async with AsyncClient(server.target, tls_ca=ca) as client:
            assert (await client.generate(PROMPT, GREEDY)).outputs[0].token_ids


async def grpc_subject(target: str, authority: Path) -> str:
    """Return the name in the gRPC server's certificate."""
    context = ssl.create_default_context(cafile=str(authority))
    context.set_alpn_protocols(["h2"])
    host, port = target.split(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    names = writer.get_extra_info("peercert")["subject"]
    writer.close()
    return str(dict(entry for names in names for entry in names)["commonName"])


def test_invalid_certificate_is_refused_when_it_is_read(certificates: Certificates, tmp_path: Path) -> None:
    nonsense = tmp_path / "nonsense"
    nonsense.write_bytes(b"\xffno certificate")
    server = certificates.server
    for cert, key, ca, problem in (
        (nonsense, server.key, None, "the TLS certificate or key is not valid"),
        (server.cert, certificates.client.key, None, "the TLS certificate or key is not valid"),
        (server.cert, server.key, nonsense, "no valid certificate"),
        (server.cert, server.key, tmp_path / "missing", "client authorities .*missing cannot be read"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load_certificate(cert, key, ca)


def test_certificate_stays_the_same_without_a_change(certificates: Certificates) -> None:
    certificate = load_certificate(certificates.server.cert, certificates.server.key)
    security = Security(certificate=constant(certificate))
    assert security.ssl_context() is not None
    assert security.server_credentials() is not None
    assert Security().ssl_context() is None
    assert Security().server_credentials() is None
