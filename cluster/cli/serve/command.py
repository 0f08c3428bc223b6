"""`quire serve` and `quire fleet`."""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ....proto.errors import Problems
from ....proto.options.option import read_environment, select_options
from ...config.deployment import ClusterOptions, Deployment, ScalingLimits
from ...config.engine_options import EngineOptions
from ...config.server_options import ServerOptions
from ...config.vllm_arguments import VllmOptions, translate_arguments
from ...os_utils.signals import signals_held
from ..deploy import FLEET_FILE_SUFFIX, read_deployments
from ..exit_status import INTERRUPTED, SIGNALED
from ..option_groups import with_options

if TYPE_CHECKING:
    from ...gateway.access.security import Security

Options = dict[str, Any]


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
            help="A Hugging Face model directory, ORG/NAME on the Hugging Face Hub, `demo` or `demo-vision` for a "
            "bundled model, or with --address a fleet file."
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
    problems = Problems()
    with problems:
        engine, server = _with_vllm_arguments(model, engine, server, vllm)
    environment: dict[str, Any] = {}
    with problems:
        environment = read_environment(os.environ, EngineOptions, ClusterOptions, ServerOptions)
    if key := os.environ.get("VLLM_API_KEY"):
        environment.setdefault("api_key", key)
    if address is not None:
        _run(lambda: _serve_fleet(problems, model, address, engine | fleet, cluster, server, environment))
    if fleet or cluster:
        raise typer.BadParameter(
            f"{', '.join(fleet | cluster)}: only a fleet has these; say where with --address"
        )
    if model.endswith(FLEET_FILE_SUFFIX):
        raise typer.BadParameter("a fleet file needs a Ray cluster; say where with --address")
    _run(lambda: _serve_one_host(problems, model, engine, server, environment))


@with_options(engine=(EngineOptions,), server=(ServerOptions,))
def fleet(
    engine: dict[str, Any],
    server: dict[str, Any],
    local: Annotated[int, typer.Option(metavar="N", min=1, help="Replicas, all on this machine.")],
    model: Annotated[
        str,
        typer.Argument(help="A Hugging Face model directory, ORG/NAME on the Hugging Face Hub, or `demo`."),
    ] = "demo",
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the certificate and the tokens are, and stay.")
    ] = Path("quire-fleet"),
) -> None:
    """Run a fleet on this machine alone until stopped: Ray, replicas, and a gateway with TLS and tokens.

    Makes the certificate and the tokens if the folder has none, and prints how to call the fleet with them
    once it is ready. Everything ends with this command. For a fleet on several machines use `quire serve --address`.

    Example: `quire fleet demo --local 2`
    """
    problems = Problems()
    environment: dict[str, Any] = {}
    with problems:
        environment = read_environment(os.environ, ClusterOptions, ServerOptions)
    replicas = {"min_replicas": local, "max_replicas": local}

    def serving() -> int:
        from .local_credentials import LocalCredentials

        credentials = LocalCredentials.make(folder)
        options = credentials.server_options() | server
        return _serve_fleet(
            problems, model, None, engine | replicas, {}, options, environment, credentials.example_commands
        )

    _run(serving)


def _run(serving: Callable[[], int]) -> NoReturn:
    """Serve, and exit with its status. A signal during start-up, also while Python imports, gets one line."""
    try:
        with signals_held():
            status = serving()
    except KeyboardInterrupt:
        status = INTERRUPTED
    if status > SIGNALED:
        print("quire: stopped before it was ready", file=sys.stderr)
    raise typer.Exit(status)


def _serve_one_host(
    problems: Problems, model: str, engine: Options, server: Options, environment: Options
) -> int:
    """Check everything that needs no cluster, then serve."""
    from ...config.early_checks import check_early
    from ...config.machine import Machine

    with problems:
        options = EngineOptions(model, **select_options(EngineOptions, environment | engine))
        check_early(options, Machine.this())
    server_options, security = _set_up_server(problems, environment | server)
    from .single_host import serve as run_server

    return run_server(options, server_options, security)


def _serve_fleet(
    problems: Problems,
    model: str,
    address: str | None,
    deployed: Options,
    cluster: Options,
    server: Options,
    environment: Options,
    example_commands: Callable[[str], Iterable[str]] = lambda address: (),
) -> int:
    with problems:
        cluster_options = ClusterOptions(**select_options(ClusterOptions, environment | cluster))
    with problems:
        deployments = read_deployments(model, deployed)
    server_options, security = _set_up_server(problems, environment | server)
    from .fleet import serve_fleet

    return serve_fleet(deployments, address, server_options, cluster_options, security, example_commands)


def _set_up_server(problems: Problems, server: Options) -> tuple[ServerOptions, "Security"]:
    """Check the server's options as well, and raise all problems together."""
    with problems:
        server_options = ServerOptions(**select_options(ServerOptions, server))
        from .server_setup import set_up_server

        security = set_up_server(server_options)
    problems.raise_any()
    return server_options, security


def _with_vllm_arguments(
    model: str, engine: dict[str, Any], server: dict[str, Any], vllm: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the given options of the engine and the server, with those that were given under vLLM's names."""
    options = translate_arguments(engine | server | vllm, model)
    return select_options(EngineOptions, options), select_options(ServerOptions, options)
