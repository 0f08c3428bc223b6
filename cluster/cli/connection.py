"""Options with which a command connects to a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config.server_options import ServerOptions

if TYPE_CHECKING:
    from ..client.client import Client

# Variable with the PEM file of the client's own certificate and key, for servers that ask for one.
CLIENT_CERT = "QUIRE_CLIENT_CERT"
DEFAULT_TARGET = ServerOptions().listen

Target = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Address of the server; of several gateways of a fleet, separated by commas, the first that answers.",
    ),
]
TokenFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File whose first line is the bearer token of each call.")
]
TlsCa = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="PEM file of the authority that signed the server's certificate."),
]


def connect(target: str, token_file: Path | None, tls_ca: Path | None) -> Client:
    from ..client.client import Client
    from ..client.wire.tokens import load_client_token

    token = None if token_file is None else load_client_token(token_file)
    return Client(target, token=token, tls_ca=tls_ca, tls_cert=os.environ.get(CLIENT_CERT))
