"""`quire deploy`, `quire delete` and `quire drain`: what operators change of a running fleet."""

from typing import Annotated, Any

import typer

from ..config.deployment import Deployment
from ..config.engine_options import EngineOptions
from ..config.scaling_limits import ScalingLimits
from .connection import Target, TlsCa, TokenFile, connect
from .deployments import read_deployments
from .option_groups import with_options


@with_options(options=(EngineOptions, ScalingLimits, Deployment))
def deploy(
    model: Annotated[
        str,
        typer.Argument(
            help="A model directory as the cluster's nodes see it, `demo`, or a fleet file (*.toml)."
        ),
    ],
    options: dict[str, Any],
    target: Target = "127.0.0.1:50051",
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Have a running fleet serve a model, or all of a fleet file. Where one is served already and its engine's
    options have changed, new replicas take over from the old ones, and no request is dropped.

    Example: `quire deploy fleet.toml --target 127.0.0.1:50051 --token-file admin-token`
    """
    deployments = read_deployments(model, options)
    with connect(target, token_file, tls_ca) as client:
        for deployment in deployments:
            version = client.deploy(deployment)
            print(f"{deployment.name}: version {version}")


def delete(
    model: Annotated[str, typer.Argument(help="The name that it is served under.")],
    target: Target = "127.0.0.1:50051",
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Have a running fleet serve a model no longer, and end its replicas.

    Example: `quire delete demo --target 127.0.0.1:50051`
    """
    with connect(target, token_file, tls_ca) as client:
        client.delete(model)


def drain(
    replica_or_node: Annotated[
        str,
        typer.Argument(help="The id of a replica or of a node, or its beginning; `quire status` shows them."),
    ],
    target: Target = "127.0.0.1:50051",
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Move the requests of a replica, or of a node's replicas, elsewhere, and end its processes.

    Example: `quire drain replica-4f2a --target 127.0.0.1:50051`
    """
    with connect(target, token_file, tls_ca) as client:
        replica_ids = client.drain(replica_or_node)
    print("\n".join(f"{replica_id} drains" for replica_id in replica_ids) or "no replica runs there")
