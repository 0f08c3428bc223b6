"""`quire run-batch`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...config.server_options import ServerOptions
from ..connection import CLIENT_CERT, TlsCa, TokenFile
from ..exit_status import FAILED

if TYPE_CHECKING:
    import ssl

    from .http_caller import Server

DEFAULT_CONCURRENCY = 64
# A large model takes this long to be read.
_READY_TIMEOUT_S = 1800.0


def run_batch(
    input_file: Annotated[
        Path,
        typer.Argument(metavar="IN", help="JSONL file of requests, in the format of OpenAI's Batch API."),
    ],
    output_file: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="JSONL file of responses. If it exists, the requests that it answers are skipped.",
        ),
    ],
    url: Annotated[
        str | None,
        typer.Option(help=f"The HTTP server. Default: http://{ServerOptions().http}.", show_default=False),
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Serve this model on this machine for the batch, instead of calling a server.",
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(help="Requests that are sent at once.", min=1, max=4096)
    ] = DEFAULT_CONCURRENCY,
    timeout_s: Annotated[
        float, typer.Option(help="Deadline of one request.", metavar="SECONDS", min=1)
    ] = 3600,
    retry_s: Annotated[
        float,
        typer.Option(
            help="Time for which a request is repeated while the server is busy or away.",
            metavar="SECONDS",
            min=0,
        ),
    ] = 300,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Run a file of requests, and collect the responses in another.

    Each line of OUT is written as its request finishes, in that order. If the command is interrupted or killed, run
    it again: it continues with the requests that have no response. The exit status is 1 if a request failed; its
    line has the HTTP status and the error.

    Example: `quire run-batch requests.jsonl responses.jsonl --url http://127.0.0.1:8000`
    """
    if url is not None and serve is not None:
        raise typer.BadParameter("--url and --serve exclude each other")
    from ...client.wire.batch_files import check_batch
    from .run import run_batch as run

    check_batch(input_file)
    with _server(url, serve, token_file, tls_ca, timeout_s, retry_s) as server, _progress() as on_progress:
        result = run(input_file, output_file, server, concurrency, on_progress)
    resumed = f", {result.num_resumed} of them by an earlier run" if result.num_resumed else ""
    print(f"{result.num_requests} requests answered{resumed}, {result.num_failed} failed", file=sys.stderr)
    if result.num_failed:
        raise typer.Exit(FAILED)


@contextmanager
def _server(
    url: str | None,
    model: str | None,
    token_file: Path | None,
    tls_ca: Path | None,
    timeout_s: float,
    retry_s: float,
) -> Iterator[Server]:
    """Yield the server of the command line; start one for a model."""
    from .http_caller import Server

    if model is None:
        from ...client.wire.tokens import load_client_token

        token = None if token_file is None else load_client_token(token_file)
        address = url or f"http://{ServerOptions().http}"
        yield Server(address, token, _tls_context(tls_ca), timeout_s, retry_s)
        return
    from ..demo.server import ServerProcess

    with ServerProcess(model) as process:
        process.wait_ready(_READY_TIMEOUT_S)
        yield Server(process.http_url, None, None, timeout_s, retry_s)


def _tls_context(tls_ca: Path | None) -> ssl.SSLContext | None:
    import ssl

    from ....proto.errors import ConfigError

    certificate = os.environ.get(CLIENT_CERT)
    if tls_ca is None and certificate is None:
        return None
    try:
        context = ssl.create_default_context(cafile=tls_ca)
        if certificate is not None:
            context.load_cert_chain(certificate)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"the certificates of --tls-ca or {CLIENT_CERT} cannot be read: {error}") from error
    return context


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows the progress on a terminal; elsewhere it does nothing."""
    if not sys.stderr.isatty():
        yield lambda num_done, num_requests: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("requests", total=None)
        yield lambda num_done, num_requests: progress.update(task, completed=num_done, total=num_requests)
