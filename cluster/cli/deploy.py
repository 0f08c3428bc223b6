"""`quire deploy`, `quire delete` and `quire drain`: changes to a running fleet."""

from typing import Annotated, Any

import typer

from ..config.deployment import Deployment, ScalingLimits
from ..config.engine_options import EngineOptions
from .connection import DEFAULT_TARGET, Target, TlsCa, TokenFile, connect
from .deployments import read_deployments
from .option_groups import with_options
from .waiting import report_wait


@with_options(options=(EngineOptions, ScalingLimits, Deployment))
def deploy(
    model: Annotated[
        str,
        typer.Argument(
            help="A model directory on the cluster's nodes, ORG/NAME on the Hugging Face Hub, `demo`, or a fleet "
            "file (*.toml)."
        ),
    ],
    options: dict[str, Any],
    target: Target = DEFAULT_TARGET,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Deploy a model, or all models of a fleet file, on a running fleet.

    If a deployed model's engine options have changed, new replicas replace the old ones and no request is dropped.
    Each option below has an environment variable, for example QUIRE_MAX_NUM_SEQS for --max-num-seqs. The command line
    and the fleet file win over the environment.

    Example: `quire deploy fleet.toml --target 127.0.0.1:50051 --token-file operator.token`
    """
    deployments = read_deployments(model, options)
    with connect(target, token_file, tls_ca) as client:
        for deployment in deployments:
            with report_wait(
                f"{deployment.name}: waiting until the fleet's controller has checked the model"
            ):
                version = client.deploy(deployment)
            print(f"{deployment.name}: version {version}")


def delete(
    model: Annotated[str, typer.Argument(help="Name that the model is served under.")],
    target: Target = DEFAULT_TARGET,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Remove a model from a running fleet and stop its replicas.

    Example: `quire delete demo --target 127.0.0.1:50051`
    """
    with connect(target, token_file, tls_ca) as client:
        client.delete(model)


def drain(
    replica_or_node: Annotated[
        str,
        typer.Argument(
            help="Id of a replica or a node, or the first characters of it; `quire status` shows ids."
        ),
    ],
    target: Target = DEFAULT_TARGET,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Move the requests of a replica, or of all replicas on a node, to other replicas, then stop it.

    Example: `quire drain replica-4f2a --target 127.0.0.1:50051`
    """
    with connect(target, token_file, tls_ca) as client:
        replica_ids = client.drain(replica_or_node)
    print("\n".join(f"{replica_id} drains" for replica_id in replica_ids) or "no replica runs there")
