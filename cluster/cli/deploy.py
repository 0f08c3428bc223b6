"""Changes to a running fleet: `quire deploy`, `delete` and `drain`, and the reading of deployments."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ...proto.options.option import read_environment
from ..config.deployment import Deployment, ScalingLimits, read_fleet_file
from ..config.engine_options import EngineOptions
from .connection import DEFAULT_TARGET, Target, TlsCa, TokenFile, connect
from .option_groups import with_options

FLEET_FILE_SUFFIX = ".toml"


def read_deployments(model: str, given: Mapping[str, Any]) -> tuple[Deployment, ...]:
    """Return the deployments of a command. Options win over the environment, and so do entries of a fleet file.

    Args:
        model: a model directory, ``demo``, or a fleet file.
        given: options of the command line, by name.

    Raises:
        ConfigError: a file cannot be read, or an option has a bad value.
        BadParameter: options are given beside a fleet file.
    """
    environment = read_environment(os.environ, EngineOptions, ScalingLimits, Deployment)
    if not model.endswith(FLEET_FILE_SUFFIX):
        return (Deployment.from_table({**environment, **given, "model": model}),)
    if given:
        raise typer.BadParameter(f"{', '.join(given)}: options of models stand in the fleet file")
    return read_fleet_file(Path(model), environment)


# No message for what takes a moment.
_INTERVAL_S = 5.0


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def report_wait(
    what: str, report: Callable[[str], object] = _print, interval_s: float = _INTERVAL_S
) -> Iterator[None]:
    """Report what the block waits for, and for how long, at each interval until the block ends."""
    start, is_over = time.monotonic(), threading.Event()

    def run() -> None:
        while not is_over.wait(interval_s):
            report(f"{what}, {time.monotonic() - start:.0f} s")

    reporter = threading.Thread(target=run, name="report_wait", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        is_over.set()
        reporter.join()


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
