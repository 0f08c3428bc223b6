"""`quire serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .deployments import read_deployments
from .engine_options import FLEET_PANEL, engine_options, fleet_options
from .groups import changed, with_options

if TYPE_CHECKING:
    from ..serve.server_options import ServerOptions


def front_options(
    listen: Annotated[
        str, typer.Option(help="HOST:PORT; port 0 lets the system choose.")
    ] = "127.0.0.1:50051",
    insecure: Annotated[
        bool, typer.Option(help="Let other machines connect without TLS and a token.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file of the server's certificate chain.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="Tokens of callers, a line each: TOKEN or TENANT:TOKEN; operators have admin:TOKEN."
        ),
    ] = None,
) -> ServerOptions:
    from ..serve.server_options import ServerOptions

    return ServerOptions(listen, insecure, tls_cert, tls_key, token_file)


@with_options(engine=engine_options, fleet=fleet_options, front=front_options)
def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face model directory, `demo` for the bundled model, or with --address a fleet file."
        ),
    ],
    engine: dict[str, Any],
    fleet: dict[str, Any],
    front: ServerOptions,
    address: Annotated[
        str | None,
        typer.Option(
            envvar="RAY_ADDRESS",
            help="HOST:PORT of a running Ray cluster, or auto: serve there, as a fleet. Else: on this machine alone.",
        ),
    ] = None,
    autoscaling_config: Annotated[
        Path | None,
        typer.Option(
            help="File that the cluster's autoscaler was started with, where it was not by `ray up`.",
            rich_help_panel=FLEET_PANEL,
        ),
    ] = None,
    spot_notices: Annotated[
        str | None,
        typer.Option(
            help="aws, gcp or azure: the cloud whose notices the cluster's machines look for, to be left in time.",
            rich_help_panel=FLEET_PANEL,
        ),
    ] = None,
) -> None:
    """Serve a model until stopped, on this machine alone or as a fleet on a Ray cluster.

    Example: `quire serve demo --tensor-parallel-size 2 --listen 127.0.0.1:0`
    """
    if address is not None:
        from ..fleet.controller import ClusterOptions
        from ..serve.fleet import serve_fleet

        config = None if autoscaling_config is None else str(autoscaling_config.resolve())
        cluster = ClusterOptions(config, spot_notices)
        raise typer.Exit(serve_fleet(read_deployments(model, engine, fleet), address, front, cluster))
    if options := changed(fleet_options, fleet):
        raise typer.BadParameter(f"{', '.join(options)}: only a fleet has these; say where with --address")
    if model.endswith(".toml"):
        raise typer.BadParameter("a fleet file needs a Ray cluster; say where with --address")
    from ..config.deployment import engine_from_table
    from ..serve.single_host import serve as run_server

    raise typer.Exit(run_server(engine_from_table({"model": model, **engine}), front))
