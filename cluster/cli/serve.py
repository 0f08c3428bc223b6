"""`quire serve`."""

import os
from typing import Annotated, Any

import typer

from ..config.cluster_options import ClusterOptions
from ..config.deployment import Deployment
from ..config.engine_options import EngineOptions
from ..config.option import read_environment, select_options
from ..config.scaling_limits import ScalingLimits
from ..config.server_options import ServerOptions
from ..config.vllm_arguments import VllmOptions, translate_arguments
from .deployments import FLEET_FILE_SUFFIX, read_deployments
from .option_groups import with_options


@with_options(
    engine=(EngineOptions,),
    fleet=(ScalingLimits, Deployment),
    cluster=(ClusterOptions,),
    server=(ServerOptions,),
    vllm=(VllmOptions,),
)
def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face model directory, ORG/NAME on the Hugging Face Hub, `demo` for the bundled model, or "
            "with --address a fleet file."
        ),
    ],
    engine: dict[str, Any],
    fleet: dict[str, Any],
    cluster: dict[str, Any],
    server: dict[str, Any],
    vllm: dict[str, Any],
    address: Annotated[
        str | None,
        typer.Option(
            envvar="RAY_ADDRESS",
            metavar="HOST:PORT",
            help="A running Ray cluster, or auto, to serve a fleet on. Default: serve on this machine alone.",
        ),
    ] = None,
) -> None:
    """Serve a model until stopped, on this machine alone or as a fleet on a Ray cluster.

    Each option below has an environment variable, for example QUIRE_MAX_NUM_SEQS for --max-num-seqs. The command line
    wins over the fleet file, the fleet file over the environment. docs/vllm.md lists the flags of
    `vllm serve` that are accepted as well.

    Example: `quire serve demo --tensor-parallel-size 2 --listen 127.0.0.1:0`
    """
    engine, server = _with_vllm_arguments(model, engine, server, vllm)
    environment = read_environment(os.environ, EngineOptions, ClusterOptions, ServerOptions)
    if key := os.environ.get("VLLM_API_KEY"):
        environment.setdefault("api_key", key)
    server_options = ServerOptions(**select_options(ServerOptions, environment | server))
    if address is not None:
        from ..serve.fleet import serve_fleet

        cluster_options = ClusterOptions(**select_options(ClusterOptions, environment | cluster))
        deployments = read_deployments(model, engine | fleet)
        raise typer.Exit(serve_fleet(deployments, address, server_options, cluster_options))
    if fleet or cluster:
        raise typer.BadParameter(
            f"{', '.join(fleet | cluster)}: only a fleet has these; say where with --address"
        )
    if model.endswith(FLEET_FILE_SUFFIX):
        raise typer.BadParameter("a fleet file needs a Ray cluster; say where with --address")
    from ..serve.single_host import serve as run_server

    options = EngineOptions(model, **select_options(EngineOptions, environment | engine))
    raise typer.Exit(run_server(options, server_options))


def _with_vllm_arguments(
    model: str, engine: dict[str, Any], server: dict[str, Any], vllm: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the given options of the engine and the server, with those that were given under vLLM's names."""
    options = translate_arguments(engine | server | vllm, model)
    return select_options(EngineOptions, options), select_options(ServerOptions, options)
